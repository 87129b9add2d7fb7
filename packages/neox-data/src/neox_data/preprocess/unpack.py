"""Decompress gzip, zstandard, bzip2 and xz files as streams, and check that they are complete.

A file may consist of several compressed streams (zstandard: frames), which are joined. Each must end as its
format requires: with its last block, and with the checksum and size that it carries.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, NamedTuple, Protocol, cast

import zstandard

__all__ = ["PACKINGS", "DamageError", "refuse_misnamed", "unpacked"]

# Small, because a block of zeros may be a thousandth of its content, and is decompressed at once.
_BLOCK_BYTES = 1 << 13
_BUFFER_BYTES = 1 << 20
# What `zstd --ultra --long=31` needs, the most that the format's tools accept.
_MOST_WINDOW_BYTES = 1 << 31


class DamageError(Exception):
    """Raised when a compressed file or an archive is damaged or incomplete; the message is the reason."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class _Packing(NamedTuple):
    """A compressed format.

    Attributes:
        name: its name in messages.
        open: returns a function that makes the decompressor of one stream.
        is_padded: whether zeros may follow the last stream.
    """

    name: str
    open: Callable[[], Callable[[], _Decompressor]]
    is_padded: bool = False


PACKINGS = {
    # 31: the format of gzip, with its checksum and size.
    ".gz": _Packing("gzip", lambda: partial(zlib.decompressobj, 31), is_padded=True),
    ".zst": _Packing(
        "zstandard", lambda: zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES).decompressobj
    ),
    ".bz2": _Packing("bzip2", lambda: bz2.BZ2Decompressor),
    ".xz": _Packing("xz", lambda: partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), is_padded=True),
}

# Place and bytes of the marks of formats that no text has: a file with one of them has the wrong name.
_MARKS = (
    (0, b"\x1f\x8b", "gzip file"),
    (0, b"\x28\xb5\x2f\xfd", "zstandard file"),
    (0, b"\xfd7zXZ\x00", "xz file"),
    (0, b"PK\x03\x04", "zip archive"),
    (0, b"PAR1\x15", "parquet file"),
    (4, b"1AY&SY", "bzip2 file"),
    (257, b"ustar", "tar archive"),
)


def unpacked(stream: BinaryIO, packing: str) -> BinaryIO:
    """Return the content of a stream compressed in the format with this suffix; "": the stream itself.

    Reading it raises `DamageError` if the content is damaged or incomplete.
    """
    if not packing:
        return stream
    # Lines are read in many small reads; a buffer makes them several times as fast.
    reader = _Joined(_contents(stream, PACKINGS[packing]))
    return cast(BinaryIO, io.BufferedReader(reader, _BUFFER_BYTES))


def refuse_misnamed(stream: BinaryIO) -> None:
    """Raise `DamageError` if a stream that is read as text begins like a compressed file or an archive."""
    begin = cast(io.BufferedReader, stream).peek(512)
    for place, mark, name in _MARKS:
        if begin.startswith(mark, place):
            raise DamageError(f"its first bytes are those of a {name}, which its name does not end like")


def _contents(packed: BinaryIO, packing: _Packing) -> Iterator[bytes]:
    """Yield what a file contains; check that each stream ends, and what follows the last one."""
    begin, number = packing.open(), 0
    block = packed.read(_BLOCK_BYTES)
    if not block:
        raise DamageError(f"it is empty, and no {packing.name} file is")
    while block:
        stream, number = begin(), number + 1
        place = f"{packing.name} stream {number}"
        while not stream.eof:
            if not block:
                raise DamageError(f"it ends within {place}")
            try:
                content = stream.decompress(block)
            except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, ValueError, EOFError) as error:
                raise DamageError(f"{place}: {error}") from error
            yield content
            block = stream.unused_data if stream.eof else packed.read(_BLOCK_BYTES)
        block = block or packed.read(_BLOCK_BYTES)
        if packing.is_padded and block.startswith(b"\0"):
            while block:
                if block.strip(b"\0"):
                    raise DamageError(f"zeros and then data follow {place}")
                block = packed.read(_BUFFER_BYTES)


class _Joined(io.RawIOBase):
    """Blocks of bytes as a stream."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = memoryview(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
