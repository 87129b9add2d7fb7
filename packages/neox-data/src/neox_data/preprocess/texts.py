"""One line or file of a corpus as texts; what is wrong with it is a ValueError with the reason."""

import json
from typing import Any

import orjson

__all__ = ["cut_text", "decode", "text_of", "texts_of_line"]


def texts_of_line(line: bytes, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The wanted texts of one JSON line; ValueError with a reason when there are none."""
    try:
        value = _parse(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply to be a document") from None
    if not isinstance(value, dict):
        return (text_of(value, "the line"),) * len(keys)
    return tuple([_text_under(key, value) for key in keys])


def _text_under(key: str, value: dict[str, Any]) -> str:
    text = value.get(key)
    # Nearly all of a corpus is this.
    if isinstance(text, str) and text.isascii():
        return text
    if key not in value:
        found = ", ".join(map(repr, list(value)[:8])) or "nothing"
        raise ValueError(f"no key {key!r}, only {found}")
    return text_of(text, f"the value of {key!r}")


def cut_text(text: str, most_bytes: int) -> list[str]:
    """Consecutive parts of at most so many bytes, up to a line's end, else a space, else within a word."""
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
    # Never inside of a character; one that is larger than a part stays whole.
    place = end
    while place > begin and data[place] & 0xC0 == 0x80:
        place -= 1
    if place > begin:
        return place
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return end


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # Python's own parser reads a little more (NaN, huge numbers), and says better what is wrong.
        return json.loads(decode(line.rstrip(b"\r\n")))


def text_of(value: Any, name: str) -> str:
    """The text that a value is; paragraphs of a list are joined."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "\n\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair at character {error.start}") from None
    return value


def decode(data: bytes) -> str:
    """The text of UTF-8 bytes, without a byte order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte 0x{data[error.start]:02x} at place {error.start + 1})") from None
