"""Read a JSON array of documents, such as a `.json.zst` of lm_dataformat, one element at a time."""

import re
from collections.abc import Iterator
from io import BufferedReader
from typing import BinaryIO, NamedTuple, cast

from neox_data.preprocess.unpack import DamageError

__all__ = ["Element", "JsonArray", "begins_array"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_BUFFER_BYTES = 1 << 20
_MARK = re.compile(rb'["\[\]{},]')
# The rest of a string, to its closing quote or to the end of what has been read.
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class Element(NamedTuple):
    """An element of an array.

    Attributes:
        data: its bytes; None if there are more than the limit.
        num_bytes: number of its bytes.
        offset: its place in the stream.
    """

    data: bytes | None
    num_bytes: int
    offset: int


def begins_array(stream: BinaryIO) -> bool:
    """Return whether a file of JSON begins with an array; nothing is consumed."""
    begin = cast(BufferedReader, stream).peek(1 << 12)
    return begin.removeprefix(_BYTE_ORDER_MARK).lstrip(_SPACE)[:1] == b"["


class JsonArray:
    """Iterates over the elements of the array that a stream consists of.

    Args:
        stream: the array, and nothing else.
        most_bytes: maximum size of an element; larger ones are yielded without their bytes. None: no maximum.
    """

    def __init__(self, stream: BinaryIO, most_bytes: int | None) -> None:
        self._stream = stream
        self._most_bytes = most_bytes
        self._data = b""
        # Places within `_data`: the next byte, and the begin of the element.
        self._at = self._begin = 0
        # Number of bytes before `_data`, and of those that the element had there.
        self._before = self._dropped = 0
        self._is_closed = False

    def __iter__(self) -> Iterator[Element]:
        """Yield the elements.

        Raises:
            DamageError: the array does not end, or something follows it.
        """
        self._open()
        number = 0
        while not self._is_closed and (element := self._next_element()) is not None:
            # `[]` and `[ ]` contain no element.
            if number or not self._is_closed or element.data != b"":
                yield element
            number += 1
        self._close(number)

    @property
    def num_bytes(self) -> int:
        """Number of bytes read."""
        return self._before + len(self._data)

    def _open(self) -> None:
        """Read up to the first bracket."""
        while (place := self._data.find(b"[")) < 0 and self._read_more():
            pass
        self._at = self._begin = place + 1

    def _next_element(self) -> Element | None:
        """Return what is before the next comma or the last bracket of the array; None at the end."""
        depth = 0
        while (mark := self._next_mark()) is not None:
            if mark == b'"':
                if not self._pass_string():
                    return None
            elif mark in b"[{":
                depth += 1
            elif depth and mark in b"]}":
                depth -= 1
            elif mark == b"}":
                raise DamageError(f"byte {self._before + self._at:,} closes an object that was not opened")
            elif not depth:
                self._is_closed = mark == b"]"
                return self._taken()
        return None

    def _close(self, number: int) -> None:
        """Raise `DamageError` unless the array is closed and nothing follows it."""
        if not self._is_closed:
            raise DamageError(f"the JSON array ends within element {number + 1:,}")
        self._begin = self._at
        while self._data[self._at :].strip(_SPACE) == b"":
            self._at = self._begin = len(self._data)
            if not self._read_more():
                return
        raise DamageError(
            f"the JSON array ends at byte {self._before + self._at:,}, but more follows; a file with an "
            "array per line must be named .jsonl"
        )

    def _next_mark(self) -> bytes | None:
        while not (found := _MARK.search(self._data, self._at)):
            self._at = len(self._data)
            if not self._read_more():
                return None
        self._at = found.end()
        return found.group()

    def _pass_string(self) -> bool:
        """Move behind the closing quote of a string; return False if it does not end."""
        while True:
            found = _REST_OF_STRING.match(self._data, self._at)
            assert found is not None, "the pattern also matches nothing"
            self._at = found.end()
            if self._data[self._at : self._at + 1] == b'"':
                self._at += 1
                return True
            # The end of the data, or a backslash before it, whose other half is needed.
            if not self._read_more():
                return False

    def _read_more(self) -> bool:
        """Read another block; drop the bytes before the element, and its own if there are too many."""
        if self._most_bytes is not None and self._dropped + self._at - self._begin > self._most_bytes:
            self._dropped += self._at - self._begin
            self._begin = self._at
        # Doubled, so that a long element is not copied once per block.
        block = self._stream.read(max(_BUFFER_BYTES, len(self._data) - self._begin))
        self._before += self._begin
        self._data = self._data[self._begin :] + block
        self._at -= self._begin
        self._begin = 0
        return bool(block)

    def _taken(self) -> Element:
        """Return the element that ends before the mark at hand, and begin the next one."""
        end = self._at - 1
        data = self._data[self._begin : end]
        num_bytes = self._dropped + len(data)
        is_short = not self._dropped and (self._most_bytes is None or num_bytes <= self._most_bytes)
        blank = len(data) - len(data.lstrip(_SPACE))
        offset = self._before + self._begin - self._dropped + (blank if is_short else 0)
        self._begin, self._dropped = self._at, 0
        return Element(data.strip(_SPACE) if is_short else None, num_bytes, offset)
