"""Read a JSON array of documents, such as a `.json.zst` of lm_dataformat, one element at a time."""

import codecs
import json
import re
from collections.abc import Iterator
from io import BufferedReader
from typing import BinaryIO, NamedTuple, cast

from neox_data.preprocess.unpack import DamageError

__all__ = ["Element", "JsonArray", "begins_array"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_BUFFER_BYTES = 1 << 20
_SPACES, _END = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n]*([,\]])")
_OTHER = re.compile(r"[^ \t\r\n]")
# More than what can be cut within a token: an exponent, a literal, an escaped pair of surrogates.
_LONGEST_TOKEN = 32


class Element(NamedTuple):
    """The bytes of an element of an array, and their place in the stream."""

    data: bytes
    offset: int


def begins_array(stream: BinaryIO) -> bool:
    """Return whether a file of JSON begins with an array; nothing is consumed."""
    begin = cast(BufferedReader, stream).peek(1 << 12)
    return begin.removeprefix(_BYTE_ORDER_MARK).lstrip(_SPACE)[:1] == b"["


class JsonArray:
    """Iterates over the elements of the array that a stream consists of.

    Attributes:
        num_bytes: number of bytes read.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.num_bytes = 0

    def _read(self, most: int = -1) -> bytes:
        block = self._stream.read(most)
        self.num_bytes += len(block)
        return block

    def __iter__(self) -> Iterator[Element]:
        """Yield the elements.

        Raises:
            DamageError: an element is not JSON, the array does not end, or something follows it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        find_end = json.JSONDecoder(strict=False).raw_decode
        while self._read(1) not in (b"[", b""):
            pass
        place = self.num_bytes
        data, at, number, mark = "", 0, 0, ","
        while mark == ",":
            found = _SPACES.match(data, at)
            begin = found.end() if found else at
            is_empty = number == 0 and data.startswith("]", begin)
            closing = None
            try:
                end = begin if is_empty else find_end(data, begin)[1]
                closing = _END.match(data, end)
                other = _OTHER.search(data, end)
                is_cut = other is None or other.start() > len(data) - _LONGEST_TOKEN
            except json.JSONDecodeError as error:
                # An element that goes on in the next block has an open string, or ends with what was read.
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(data) - _LONGEST_TOKEN
            except (ValueError, RecursionError):
                is_cut = False
            if closing is None:
                # Doubled, so that a long element is not parsed once per block.
                block = self._read(max(_BUFFER_BYTES, len(data) - at)) if is_cut else b""
                if not block:
                    raise DamageError(f"element {number + 1:,} of the JSON array is not JSON, or has no end")
                data, at = data[at:] + decoder.decode(block), 0
                continue
            if not is_empty:
                yield Element(_bytes(data[begin:end]), place + len(_bytes(data[at:begin])))
            place += len(_bytes(data[at : closing.end()]))
            number, mark, at = number + 1, closing[1], closing.end()
        if data[at:].strip() or self._read().strip():
            raise DamageError(
                f"the JSON array ends at byte {place:,}, but more follows; name a file of arrays, one per "
                "line, *.jsonl"
            )


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
