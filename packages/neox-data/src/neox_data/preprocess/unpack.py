"""Decompress gzip, zstandard, bzip2 and xz files as streams, and check that they are complete.

A file may consist of several compressed streams (zstandard: frames), which are joined. Each must end as its
format requires: with its last block, and with the checksum and size that it carries.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
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


def _open_zstandard() -> Callable[[], _Decompressor]:
    return cast(
        Callable[[], _Decompressor],
        zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES).decompressobj,
    )


PACKINGS = {
    # 31: the format of gzip, with its checksum and size.
    ".gz": _Packing("gzip", lambda: partial(zlib.decompressobj, 31), is_padded=True),
    ".zst": _Packing("zstandard", _open_zstandard),
    ".bz2": _Packing("bzip2", lambda: bz2.BZ2Decompressor),
    ".xz": _Packing("xz", lambda: partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), is_padded=True),
}

# First bytes of formats that no text begins with: a file with one of them has the wrong name.
_BEGINNINGS = {
    b"\x1f\x8b": "gzip file",
    b"\x28\xb5\x2f\xfd": "zstandard file",
    b"\xfd7zXZ\x00": "xz file",
    b"PK\x03\x04": "zip archive",
    b"PAR1\x15": "parquet file",
}
_TAR_MARK, _TAR_MARK_AT = b"ustar", 257
_BZIP2_MARK, _BZIP2_MARK_AT = b"1AY&SY", 4


def unpacked(stream: BinaryIO, packing: str) -> BinaryIO:
    """Return the content of a stream compressed in the format with this suffix; "": the stream itself.

    Reading it raises `DamageError` if the content is damaged or incomplete.
    """
    if not packing:
        return stream
    reader = _Unpacked(stream, PACKINGS[packing])
    # Lines are read in many small reads; a buffer makes them several times as fast.
    return cast(BinaryIO, io.BufferedReader(reader, _BUFFER_BYTES))


def refuse_misnamed(stream: BinaryIO) -> None:
    """Raise `DamageError` if a stream that is read as text begins like a compressed file or an archive."""
    begin = cast(io.BufferedReader, stream).peek(512)
    found = next((name for magic, name in _BEGINNINGS.items() if begin.startswith(magic)), None)
    if begin[_TAR_MARK_AT:].startswith(_TAR_MARK):
        found = "tar archive"
    if begin.startswith(b"BZh") and begin[_BZIP2_MARK_AT:].startswith(_BZIP2_MARK):
        found = "bzip2 file"
    if found:
        raise DamageError(f"its first bytes are those of a {found}, which its name does not end like")


class _Unpacked(io.RawIOBase):
    def __init__(self, packed: BinaryIO, packing: _Packing) -> None:
        self._packed = packed
        self._packing = packing
        self._begin = packing.open()
        self._stream: _Decompressor | None = None
        self._num_streams = 0
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            block = self._next_block()
            if not block:
                return 0
            self._ready = memoryview(self._decompressed(block))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _next_block(self) -> bytes:
        """Return the next compressed bytes, and begin a stream if the last one has ended; b"": the end."""
        if self._stream is not None and not self._stream.eof:
            block = self._packed.read(_BLOCK_BYTES)
            if not block:
                raise DamageError(f"it ends within {self._packing.name} stream {self._num_streams}")
            return block
        block = (self._stream.unused_data if self._stream else b"") or self._packed.read(_BLOCK_BYTES)
        if not block and self._stream is None:
            raise DamageError(f"it is empty, and no {self._packing.name} file is")
        if not block or (self._stream and self._packing.is_padded and self._is_padding(block)):
            return b""
        self._stream = self._begin()
        self._num_streams += 1
        return block

    def _is_padding(self, block: bytes) -> bool:
        """Return whether the rest of the file is zeros; raise `DamageError` if data follow them."""
        if block[0]:
            return False
        while block:
            if block.strip(b"\0"):
                raise DamageError(
                    f"zeros and then data follow {self._packing.name} stream {self._num_streams}"
                )
            block = self._packed.read(_BUFFER_BYTES)
        self._stream = _Ended()
        return True

    def _decompressed(self, block: bytes) -> bytes:
        assert self._stream is not None
        try:
            return self._stream.decompress(block)
        except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, ValueError, EOFError) as error:
            raise DamageError(f"{self._packing.name} stream {self._num_streams}: {error}") from error


class _Ended:
    """The decompressor of a file whose padding has been read."""

    eof = True
    unused_data = b""

    def decompress(self, data: bytes, /) -> bytes:
        return data
