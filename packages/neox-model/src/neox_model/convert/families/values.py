"""Values of a config.json, whose types are checked, and values of our layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neox_config.spec.values import ABSENT, Each
from neox_model.convert.errors import ConversionError

__all__ = [
    *("CHECKS", "Optional"),
    *("first", "in_layers", "layer_count", "number", "positive", "truth", "whole_number"),
]

_LARGEST = 1e30
# That of num-layers. What is listed for each layer must not fill the memory.
_MOST_LAYERS = 10_000


def whole_number(value: Any, name: str) -> int:
    """Return a value that must be a whole number of at least 1; all of these raise ConversionError."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
        return value
    raise _wrong(value, name, "a whole number of at least 1")


def layer_count(value: Any, name: str) -> int:
    """Return a value that must be a number of layers that a model of ours can have."""
    if whole_number(value, name) > _MOST_LAYERS:
        raise _wrong(value, name, f"a number of layers of at most {_MOST_LAYERS:,}")
    return int(value)


def number(value: Any, name: str) -> float:
    """Return a value that must be a finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST:
        return float(value)
    raise _wrong(value, name, "a number")


def positive(value: Any, name: str) -> float:
    """Return a value that must be a number above 0."""
    if number(value, name) > 0:
        return float(value)
    raise _wrong(value, name, "a number above 0")


def truth(value: Any, name: str) -> bool:
    """Return a value that must be true or false."""
    if isinstance(value, bool):
        return value
    raise _wrong(value, name, "true or false")


CHECKS: Mapping[Any, Callable[[Any, str], Any]] = {int: whole_number, float: number, bool: truth}
"""By the type that a value must have."""


@dataclass(frozen=True, slots=True)
class Optional:
    """A number that may be null.

    Args:
        theirs: name of the entry.
        ours: path of the value in `ModelSpec`.
        default: the number if the entry is absent.
    """

    theirs: str
    ours: str
    default: float | None = None

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the number."""
        found = config.get(self.theirs, self.default)
        return {self.ours: None if found is None else number(found, self.theirs)}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the number."""
        config[self.theirs] = first(model, self.ours)


def in_layers(model: Mapping[str, Any], path: str) -> tuple[Any, ...]:
    """Return the value of each layer, given the values of a model by path."""
    value = model.get(path, ABSENT)
    return value.values if isinstance(value, Each) else (value,) * model["layers"]


def first(model: Mapping[str, Any], path: str) -> Any:
    """Return the value of a path, of the first layer that has it."""
    value = model[path]
    return next(each for each in value.values if each is not ABSENT) if isinstance(value, Each) else value


def _wrong(value: Any, name: str, expected: str) -> ConversionError:
    return ConversionError(
        f"config.json has {name}: {value!r}, which is not {expected}; correct it, or copy the folder again"
    )
