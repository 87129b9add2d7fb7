"""Read a JSON array of documents, such as a `.json.zst` of lm_dataformat, one element at a time."""

import re
import sys
from collections.abc import Iterator
from io import BufferedReader
from typing import BinaryIO, NamedTuple, cast

from neox_data.preprocess.unpack import DamageError

__all__ = ["Element", "JsonArray", "begins_array"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_BUFFER_BYTES = 1 << 20
# What is passed on the way to the array, to the next mark in it, and to the end of a string.
_BEFORE_ARRAY, _BEFORE_MARK = re.compile(rb"[^\[]*+"), re.compile(rb'[^"\[\]{},]*+')
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


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

    Attributes:
        num_bytes: number of bytes read.
    """

    def __init__(self, stream: BinaryIO, most_bytes: int | None) -> None:
        self._stream = stream
        self._most_bytes = sys.maxsize if most_bytes is None else most_bytes
        self.num_bytes = 0
        self._data = b""
        # Places within `_data`: the next byte, and the first of the element that is kept.
        self._at = self._begin = 0
        # Place of the element in the stream.
        self._start = 0

    def __iter__(self) -> Iterator[Element]:
        """Yield the elements.

        Raises:
            DamageError: the array does not end, or something follows it.
        """
        self._next(_BEFORE_ARRAY)
        self._begin, self._start = self._at, self._place
        number, depth, is_closed = 0, 0, False
        while not is_closed:
            mark = self._next(_BEFORE_MARK)
            if mark == b'"':
                mark = self._next(_IN_STRING)
            if not mark:
                raise DamageError(f"the JSON array ends within element {number + 1:,}")
            if mark in b"[{":
                depth += 1
            elif depth:
                depth -= mark in b"]}"
            elif mark == b"}":
                raise DamageError(f"byte {self._place:,} closes an object that was not opened")
            elif mark in b",]":
                element, is_closed = self._element(), mark == b"]"
                # `[]` and `[ ]` contain no element.
                if number or not is_closed or element.data != b"":
                    yield element
                number += 1
                self._begin, self._start = self._at, self._place
        while not self._data[self._at :].strip(_SPACE):
            self._at = self._begin = len(self._data)
            if not self._read_more():
                return
        raise DamageError(
            f"the JSON array ends at byte {self._place:,}, but more follows; a file with an array per line "
            "must be named .jsonl"
        )

    @property
    def _place(self) -> int:
        """The place of the next byte in the stream."""
        return self.num_bytes - len(self._data) + self._at

    def _next(self, passed: re.Pattern[bytes]) -> bytes:
        """Pass what a pattern matches, and return the byte behind it, which is passed, too; b"": the end."""
        while True:
            found = passed.match(self._data, self._at)
            assert found is not None, "the patterns also match nothing"
            self._at = found.end()
            mark = self._data[self._at : self._at + 1]
            # A backslash is the last byte of the data; its other half is needed.
            if mark not in (b"", b"\\"):
                self._at += 1
                return mark
            if not self._read_more():
                return b""

    def _read_more(self) -> bool:
        """Read another block; drop the bytes before the element, and its own if there are too many."""
        if self._place - self._start > self._most_bytes:
            self._begin = self._at
        # Doubled, so that a long element is not copied once per block.
        block = self._stream.read(max(_BUFFER_BYTES, len(self._data) - self._begin))
        self.num_bytes += len(block)
        self._data = self._data[self._begin :] + block
        self._at -= self._begin
        self._begin = 0
        return bool(block)

    def _element(self) -> Element:
        """Return the element that ends before the mark at hand."""
        data = self._data[self._begin : self._at - 1]
        num_bytes = self._place - 1 - self._start
        if not len(data) == num_bytes <= self._most_bytes:
            return Element(None, num_bytes, self._start)
        content = data.lstrip(_SPACE)
        return Element(content.rstrip(_SPACE), num_bytes, self._start + len(data) - len(content))
