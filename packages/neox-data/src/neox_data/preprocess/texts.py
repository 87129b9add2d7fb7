"""Extract texts from a line or file of a corpus; raise ValueError with the reason for invalid ones."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from neox_data.pluralize import first_few

__all__ = [
    "MissingKeyError",
    "TextFrom",
    "cut_text",
    "decode",
    "of_json",
    "text_of",
    "text_under",
    "texts_of_line",
]


# What keys of conversations with numbers contain.
_WITH_NUMBERS = (b"tool", b"function_call", b"documents")
TextFrom = Callable[[Any, str, Mapping[str, Any]], str | None]


class MissingKeyError(ValueError):
    """Raised when a document has no text under a requested key."""


def texts_of_line(
    line: bytes, keys: tuple[str, ...], text_from: TextFrom | None = None
) -> tuple[str | None, ...]:
    """Return the texts under the keys of one JSON line, None for null; raise ValueError if there are none.

    Args:
        line: the line.
        keys: the keys.
        text_from: function of (value, its name, the line) that makes a text of a value; the line must be an
            object then. None: `text_of`.
    """
    # The faster parser rounds whole numbers of more than 64 bits.
    is_exact = text_from is not None and any(key in line for key in _WITH_NUMBERS)
    try:
        value = of_json(decode(line.rstrip(b"\r\n"))) if is_exact else orjson.loads(line)
    except orjson.JSONDecodeError:
        # Python's parser accepts slightly more (NaN, huge numbers), and has better error messages.
        value = of_json(decode(line.rstrip(b"\r\n")))
    if not isinstance(value, dict):
        if text_from is not None:
            raise ValueError(
                f"it is {type(value).__name__}, not an object with {' and '.join(map(repr, keys))}"
            )
        # A null in place of the whole document is no document with a null text.
        if value is None:
            raise ValueError("it is null, not text")
        return (text_of(value, "the line"),) * len(keys)
    return tuple([text_under(key, value, text_from) for key in keys])


def text_under(key: str, value: dict[str, Any], text_from: TextFrom | None) -> str | None:
    """Return the text under a key of an object, None for null; raise ValueError if there is none."""
    text = value.get(key)
    # Fast path for nearly all of a corpus.
    if text_from is None and isinstance(text, str) and text.isascii():
        return text
    if key not in value:
        found = first_few([repr(each) for each in value], 8) or "none"
        raise MissingKeyError(f"no key {key!r}; its keys are {found}")
    name = f"the value of {key!r}"
    return text_of(text, name) if text_from is None else text_from(text, name, value)


def cut_text(text: str, most_bytes: int) -> list[str]:
    """Split a text into parts of at most `most_bytes`, at a line end, else a space, else within a word."""
    data, parts, begin = text.encode(), [], 0
    while len(data) - begin > most_bytes:
        end = _place_to_cut(data, begin, begin + most_bytes)
        parts.append(data[begin:end].decode())
        begin = end
    return [*parts, data[begin:].decode()]


def _place_to_cut(data: bytes, begin: int, end: int) -> int:
    for mark in (b"\n", b" "):
        if (place := data.rfind(mark, begin, end)) >= 0:
            return place + 1
    # Never split a character; one that is larger than a part is kept whole.
    place = end
    while place > begin and data[place] & 0xC0 == 0x80:
        place -= 1
    if place > begin:
        return place
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return end


def of_json(text: str) -> Any:
    """Return the value of a text of JSON; raise ValueError with the reason if it is not readable as such."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except ValueError:
        limit = sys.get_int_max_str_digits()
        raise ValueError(f"the JSON has a whole number of more than {limit:,} digits") from None


def text_of(value: Any, name: str) -> str | None:
    """Return a value as text, joining a list of paragraphs; None for null."""
    if value is None:
        return None
    if isinstance(value, bytes):
        # A cell of a table: what begins it is part of the text.
        return decode(value, "utf-8")
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "\n\n".join(value)
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        raise ValueError(
            f"{name} is a list of objects, not text; preprocess_data --loss-mask chat reads conversations"
        )
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} contains an unpaired surrogate at character {error.start}") from None
    return value


def decode(data: bytes, encoding: str = "utf-8-sig") -> str:
    """Decode UTF-8 bytes, by default those of a file, without a byte order mark."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 (byte 0x{data[error.start]:02x} at position {error.start + 1})"
        ) from None
