"""Values of a config.json, whose types are checked."""

from typing import Any

from neox_model.convert.errors import ConversionError

__all__ = ["number", "truth", "typed", "whole_number"]

_LARGEST = 1e30


def whole_number(value: Any, name: str) -> int:
    """Return a value that must be a whole number of at least 1.

    Raises:
        ConversionError: it is something else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
        return value
    raise _wrong(value, name, "a whole number of at least 1")


def number(value: Any, name: str) -> float:
    """Return a value that must be a finite number.

    Raises:
        ConversionError: it is something else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST:
        return float(value)
    raise _wrong(value, name, "a number")


def truth(value: Any, name: str) -> bool:
    """Return a value that must be true or false.

    Raises:
        ConversionError: it is something else.
    """
    if isinstance(value, bool):
        return value
    raise _wrong(value, name, "true or false")


_CHECKS = {int: whole_number, float: number, bool: truth}


def typed(value: Any, name: str, kind: Any) -> Any:
    """Return a value that must have a type: int, float or bool; others are not checked.

    Raises:
        ConversionError: it has another one.
    """
    return _CHECKS[kind](value, name) if kind in _CHECKS else value


def _wrong(value: Any, name: str, expected: str) -> ConversionError:
    return ConversionError(
        f"config.json has {name}: {value!r}, which is not {expected}; correct it, or copy the folder again"
    )
