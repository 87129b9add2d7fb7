"""Conversion of single values as written in configuration files.

`5e8` and `"1_000"` are numbers where a number is expected, `5.0` is a whole number, and choices are
case-insensitive. `true` is never a number, and a number is never text.
"""

import math
import re
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticCustomError

__all__ = ["LARGEST", "NUMBER", "QUOTE", "WORDS", "has_points", "number_from", "read_scalar", "written_limit"]

# Upper limits of numbers, also of those in lists, whose parameters have no smaller one.
LARGEST: dict[type, float] = {int: 10**18, float: 1e30}
QUOTE = "put it in quotes to make it text"
_LONGEST_NUMBER = 300
# Characters that no name or path has; in most texts, those of the first group are mistakes, too.
_LINES, _CONTROLS = "\n\r\t", "\f\b\a\v\0\x1b"
# Accepted spellings of numbers.
NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
# A number that looks like thousands where a point separates them; a whole number needs no fraction of zeros.
_POINTS = re.compile(r"[-+]?[1-9][0-9]{0,2}(\.000)+")
# Names of the types in messages and in the documentation.
WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "block",
    SecretStr: "secret text",
}


def read_scalar(value: Any, kinds: frozenset[Any], *, may_have_lines: bool = False) -> Any:
    """Convert a value to one of the types of its field.

    Args:
        value: the value as written.
        kinds: scalar types and choices of the field; empty if the field is not a scalar.
        may_have_lines: True if a text may contain line breaks and tabs.

    Raises:
        PydanticCustomError: The value has none of these types; the message is followed by "; " and a remedy.
    """
    if isinstance(value, list):
        _check_list(value)
    if not kinds:
        return value
    if isinstance(value, bool):
        return value if bool in kinds else _wrong(kinds)
    if isinstance(value, int | float):
        return _read_number(value, kinds)
    if isinstance(value, str):
        return _read_text(value, kinds, may_have_lines)
    return value if value is None or isinstance(value, dict | list | tuple | BaseModel) else _wrong(kinds)


def _read_number(value: int | float, kinds: frozenset[Any]) -> Any:
    is_whole = int in kinds or _has_choices(kinds, int)
    if not is_whole and float not in kinds:
        return _wrong(kinds)
    _check_size(value, LARGEST[float if float in kinds else int])
    if is_whole and float(value).is_integer():
        return int(value)
    return float(value) if float in kinds else value if _has_choices(kinds, int) else _wrong(kinds)


def _check_list(values: list[Any]) -> None:
    for value in values:
        if isinstance(value, list):
            _check_list(value)
        elif isinstance(value, int | float):
            _check_size(value, LARGEST[int if isinstance(value, int) else float])


def _check_size(value: float, largest: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("neox", "must be a finite number")
    if abs(value) > largest:
        limit = written_limit(largest)
        raise PydanticCustomError("neox", f"must be a number between -{limit} and {limit}")


def written_limit(value: float) -> str:
    """Return a limit as written in a configuration: 10,000 as 10000, a million as 1e6."""
    text = f"{value:g}"
    return (
        text.replace("e+0", "e").replace("e+", "e") if "e+" in text and float(text) == value else str(value)
    )


def _read_text(value: str, kinds: frozenset[Any], may_have_lines: bool) -> Any:
    if str in kinds:
        return _checked_text(value, may_have_lines)
    if value in kinds:
        return value
    folded = {choice.casefold(): choice for choice in kinds if isinstance(choice, str)}
    if value.casefold() in folded:
        return folded[value.casefold()]
    if bool in kinds and value.casefold() in ("true", "false"):
        return value.casefold() == "true"
    if int in kinds and float not in kinds and has_points(value):
        plain = value.strip().replace(".", "")
        is_read = f"{value.strip()} is {float(value):g}; " if value.count(".") == 1 else ""
        return _wrong(kinds, f"; {is_read}for {int(plain):,} write {plain}")
    if int in kinds or float in kinds or _has_choices(kinds, int):
        number = number_from(value)
        return _wrong(kinds) if number is None else _read_number(number, kinds)
    return value if folded and bool not in kinds else _wrong(kinds)


def _checked_text(value: str, may_have_lines: bool) -> str:
    """Return the text; raise an error for None (Python's null) and for control characters in it."""
    refused = _CONTROLS if may_have_lines else _LINES + _CONTROLS
    if value == "None":
        raise PydanticCustomError(
            "neox", "must not be None, which is Python's null; write null, or remove it"
        )
    if any(char in value for char in refused):
        raise PydanticCustomError(
            "neox",
            "contains a line break or a tab, written as a backslash escape in double quotes; use single "
            "quotes, or / instead of \\",
        )
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "neox", f"contains {value[error.start]!a}, half of a character; write the whole character"
        ) from None
    return value


def number_from(text: str) -> int | float | None:
    """Return the number written as a text (`5e8`, `1_000`, `-.5`), or None."""
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not NUMBER.fullmatch(text):
        return None
    digits = text.replace("_", "")
    return int(digits) if digits.lstrip("+-").isdecimal() else float(digits)


def has_points(text: str) -> bool:
    """Return whether points may separate the thousands of a number, as in `10.000`, which is 10."""
    return _POINTS.fullmatch(text.strip()) is not None


def _has_choices(kinds: frozenset[Any], kind: type) -> bool:
    return any(isinstance(choice, kind) for choice in kinds)


def _wrong(kinds: frozenset[Any], remedy: str = "") -> Any:
    """Raise the error for a value of the wrong type."""
    choices = sorted(str(kind) for kind in kinds if isinstance(kind, str | int))
    if choices:
        wanted = "one of " + ", ".join((["true", "false"] if bool in kinds else []) + choices)
    else:
        wanted = " or ".join(WORDS[kind] for kind in (bool, int, float, str) if kind in kinds)
        wanted = wanted if wanted.startswith(("true", "text")) else f"a {wanted}"
    if kinds == {str}:
        remedy = f"; {QUOTE}"
    raise PydanticCustomError("neox", f"must be {wanted}{remedy}")
