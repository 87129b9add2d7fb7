"""One value, as people write it.

`5e8` and `"1_000"` are numbers wherever a number is expected, `5.0` is a whole number, choices may be in any
case. `true` is never a number, and a number is never text.
"""

import math
import re
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticCustomError

__all__ = ["NUMBER", "WORDS", "number_from", "read_scalar"]

_LARGEST = 1e300
_LONGEST_NUMBER = 300
# Words that are true or false without quotes only.
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}
# How people write numbers.
NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
# What the types are called.
WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "block",
    SecretStr: "secret text",
}


def read_scalar(value: Any, kinds: frozenset[Any]) -> Any:
    """A value as its field understands it.

    Args:
        value: as written.
        kinds: the scalar types that the field takes, with its choices; empty where it takes something else.

    Raises:
        PydanticCustomError: it is none of them; what, and behind "; " the remedy.
    """
    if not kinds:
        return value
    if isinstance(value, bool):
        return value if bool in kinds else _wrong(kinds)
    if isinstance(value, int | float):
        return _read_number(value, kinds)
    if isinstance(value, str):
        return _read_text(value, kinds)
    return value if value is None or isinstance(value, dict | list | tuple | BaseModel) else _wrong(kinds)


def _read_number(value: int | float, kinds: frozenset[Any]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("neox", "must be a finite number")
    if abs(value) > _LARGEST:
        raise PydanticCustomError("neox", "is too large")
    if (int in kinds or _has_choices(kinds, int)) and float(value).is_integer():
        return int(value)
    if float in kinds:
        return float(value)
    return value if _has_choices(kinds, int) else _wrong(kinds)


def _read_text(value: str, kinds: frozenset[Any]) -> Any:
    if str in kinds:
        return _checked_text(value)
    if value in kinds:
        return value
    folded = {choice.casefold(): choice for choice in kinds if isinstance(choice, str)}
    if value.casefold() in folded:
        return folded[value.casefold()]
    if bool in kinds and value.casefold() in ("true", "false"):
        return value.casefold() == "true"
    if bool in kinds and value.casefold() in _SWITCHES:
        return _wrong(kinds, f"; write {_SWITCHES[value.casefold()]}")
    if int in kinds or float in kinds or _has_choices(kinds, int):
        number = number_from(value)
        return _wrong(kinds, _as_number(value)) if number is None else _read_number(number, kinds)
    return value if folded and bool not in kinds else _wrong(kinds)


def _checked_text(value: str) -> str:
    """The text, unless it is a slip that would be found late: a file called None, or a path with tabs."""
    if value == "None":
        raise PydanticCustomError("neox", "is the word of Python; write null, or leave it out")
    if any(char in value for char in "\n\r\t\f\b\a\v\0\x1b"):
        raise PydanticCustomError(
            "neox",
            "holds a line break or a tab; in double quotes a backslash makes one: "
            "use single quotes, or / instead of \\",
        )
    return value


def _as_number(value: str) -> str:
    """How to write what is nearly a number, as a remedy."""
    plain = value.replace(",", "").strip()
    return f"; write {plain}" if plain != value and number_from(plain) is not None else ""


def number_from(text: str) -> int | float | None:
    """The number that a text spells (`5e8`, `1_000`, `-.5`), or None."""
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not NUMBER.fullmatch(text):
        return None
    digits = text.replace("_", "")
    return int(digits) if digits.lstrip("+-").isdecimal() else float(digits)


def _has_choices(kinds: frozenset[Any], kind: type) -> bool:
    return any(isinstance(choice, kind) for choice in kinds)


def _wrong(kinds: frozenset[Any], remedy: str = "") -> Any:
    """Raise what pydantic carries to the list of problems."""
    choices = sorted(str(kind) for kind in kinds if isinstance(kind, str | int))
    if choices:
        wanted = "one of " + ", ".join((["true", "false"] if bool in kinds else []) + choices)
    else:
        wanted = " or ".join(WORDS[kind] for kind in (bool, int, float, str) if kind in kinds)
        wanted = wanted if wanted.startswith(("true", "text")) else f"a {wanted}"
    if kinds == {str}:
        remedy = "; put it in quotes if it is meant as text"
    raise PydanticCustomError("neox", f"must be {wanted}{remedy}")
