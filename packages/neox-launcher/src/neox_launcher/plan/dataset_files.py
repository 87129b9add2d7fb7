"""Checks that the two files of a dataset match and are complete, using only their headers and sizes.

The launcher runs these checks before it starts workers, without numpy. neox-data, which reads the data, has
its own description of the format (`neox_data.indexed.layout`); a test compares the two.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from neox_config.files import why_not_readable

__all__ = [
    "BLOCK_INDEX",
    "Documents",
    "check_indexed_files",
    "count_documents",
    "count_tokens",
    "data_path",
    "index_path",
    "manifest_path",
    "open_documents",
]

BLOCK_INDEX = "index.json"
"""The file that describes an index of blocks, in its folder."""

_MMAP_MAGIC = b"MMIDIDX\x00\x00"
_MMAP_HEADER = struct.Struct("<9sQBQQ")
_OLDER_MAGIC = b"TNTIDX\x00\x00"
_OLDER_HEADER = struct.Struct("<8sQQQQQQ")
_VERSION = 1

# Bytes per token by dtype code. Different writers use codes 6 and 7 for different types.
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
_DISPUTED_CODES = (6, 7)
# 4 MiB.
_SIZES_AT_ONCE = 2**20
_LABELS_AT_ONCE = 2**20
# Label of a token that the loss leaves out.
_IGNORED = -100


def index_path(prefix: str) -> Path:
    """Return the file that describes where each sequence is."""
    return Path(f"{prefix}.idx")


def data_path(prefix: str) -> Path:
    """Return the file with the tokens."""
    return Path(f"{prefix}.bin")


def manifest_path(prefix: str) -> Path:
    """Return the file that describes how the dataset was made."""
    return Path(f"{prefix}.manifest.json")


def check_indexed_files(prefix: str) -> str | None:
    """Return the problem of `PREFIX.idx` and `PREFIX.bin` as one sentence, or None if there is none.

    Reads a few dozen bytes, independent of the size of the files.
    """
    index, data = index_path(prefix), data_path(prefix)
    for path in (index, data):
        reason = why_not_readable(path)
        if reason is not None:
            return f"{path} {reason}"
    try:
        with index.open("rb") as file:
            needed = _bytes_of_data(file, index.stat().st_size)
    except (OSError, ValueError) as error:
        return f"{index} {error}"
    present = data.stat().st_size
    if needed is not None and present < needed:
        return f"{data} has {present:,} bytes, but its index describes {needed:,}: it is incomplete"
    return None


def count_documents(prefix: str) -> int | None:
    """Return the number of documents of a dataset, or None if it has another format or cannot be read."""
    try:
        with index_path(prefix).open("rb") as file:
            header = file.read(_MMAP_HEADER.size)
    except OSError:
        return None
    if len(header) < _MMAP_HEADER.size or not header.startswith(_MMAP_MAGIC):
        return None
    return int(_MMAP_HEADER.unpack(header)[3])


def count_tokens(prefix: str, documents: Callable[[int], int]) -> int:
    """Return the number of tokens in the first documents of a dataset, as its index states their sizes.

    Args:
        prefix: path of the dataset, without extension.
        documents: the number of documents in the dataset -> how many of them to count.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is damaged, or has another format.
    """
    path = index_path(prefix)
    with path.open("rb") as file:
        _bytes_of_data(file, path.stat().st_size)
        file.seek(0)
        if file.read(len(_MMAP_MAGIC)) != _MMAP_MAGIC:
            raise ValueError("is in an older format, which train-epochs does not count")
        file.seek(0)
        left = documents(_MMAP_HEADER.unpack(file.read(_MMAP_HEADER.size))[3])
        tokens = 0
        while left > 0:
            sizes = array("i")
            sizes.fromfile(file, min(left, _SIZES_AT_ONCE))
            if sys.byteorder == "big":
                sizes.byteswap()
            tokens += sum(sizes)
            left -= len(sizes)
        return tokens


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a dataset whose files are open.

    Args:
        index: the `.idx`.
        data: the `.bin`.
        count: number of documents.
        item_bytes: bytes of a token or label.
    """

    index: BinaryIO
    data: BinaryIO
    count: int
    item_bytes: int

    def size(self, number: int) -> int:
        """Return the number of tokens of a document."""
        (size,) = _read_at(self.index, _MMAP_HEADER.size + 4 * number, "<i")
        return int(size)

    def has_label(self, number: int, looked_at: slice) -> bool:
        """Return whether the loss counts one of these labels of a document."""
        (offset,) = _read_at(self.index, _MMAP_HEADER.size + 4 * self.count + 8 * number, "<q")
        ignored = _IGNORED.to_bytes(self.item_bytes, "little", signed=True)
        first, stop, _ = looked_at.indices(self.size(number))
        self.data.seek(offset + first * self.item_bytes)
        for place in range(first, stop, _LABELS_AT_ONCE):
            count = min(_LABELS_AT_ONCE, stop - place)
            if self.data.read(count * self.item_bytes) != ignored * count:
                return True
        return False


@contextmanager
def open_documents(prefix: str) -> Iterator[Documents]:
    """Open the files of a dataset to read single documents.

    Raises:
        OSError: they cannot be read.
        ValueError: they are damaged, or have another format.
    """
    path = index_path(prefix)
    with path.open("rb") as index, data_path(prefix).open("rb") as data:
        _bytes_of_data(index, path.stat().st_size)
        index.seek(0)
        magic, _, code, count, _ = _MMAP_HEADER.unpack(index.read(_MMAP_HEADER.size))
        if magic != _MMAP_MAGIC or code not in _ITEM_BYTES:
            raise ValueError("is in an older format, whose documents are not read here")
        yield Documents(index, data, count, _ITEM_BYTES[code])


def _bytes_of_data(file: BinaryIO, size: int) -> int | None:
    """Return the bytes of data that the index describes, or None if the dtype code is ambiguous.

    Raises:
        ValueError: the index is invalid.
    """
    magic = file.read(len(_MMAP_MAGIC))
    file.seek(0)
    if magic == _MMAP_MAGIC:
        return _mmap_layout(file, size)
    if magic.startswith(_OLDER_MAGIC):
        return _older_layout(file, size)
    raise ValueError("is not a dataset index: its first bytes are not those that preprocess_data writes")


def _mmap_layout(file: BinaryIO, size: int) -> int | None:
    if size < _MMAP_HEADER.size:
        raise ValueError(f"ends after {size} bytes, inside its header")
    _, version, code, sequences, documents = _MMAP_HEADER.unpack(file.read(_MMAP_HEADER.size))
    _check_version(version)
    expected = _MMAP_HEADER.size + 12 * sequences + 8 * documents
    # Some writers add a byte per sequence.
    _check_size(size, (expected, expected + sequences))
    if code not in _ITEM_BYTES and code not in _DISPUTED_CODES:
        raise ValueError(f"has the unknown dtype code {code}")
    if not sequences:
        raise ValueError("contains no documents")
    if code in _DISPUTED_CODES:
        return None
    (length,) = _read_at(file, _MMAP_HEADER.size + 4 * (sequences - 1), "<i")
    (offset,) = _read_at(file, _MMAP_HEADER.size + 4 * sequences + 8 * (sequences - 1), "<q")
    return _checked_end(offset, length * _ITEM_BYTES[code])


def _older_layout(file: BinaryIO, size: int) -> int:
    if size < _OLDER_HEADER.size:
        raise ValueError(f"ends after {size} bytes, inside its header")
    _, version, _, item_bytes, items, sizes, documents = _OLDER_HEADER.unpack(file.read(_OLDER_HEADER.size))
    _check_version(version)
    _check_size(size, (_OLDER_HEADER.size + 16 * (items + 1) + 8 * sizes + 8 * documents,))
    (end,) = _read_at(file, _OLDER_HEADER.size + 16 * items + 8, "<q")
    return _checked_end(0, end * item_bytes)


def _check_version(version: int) -> None:
    if version != _VERSION:
        raise ValueError(f"has version {version:,}; only version {_VERSION} is supported")


def _check_size(size: int, expected: tuple[int, ...]) -> None:
    if size not in expected:
        raise ValueError(
            f"has {size:,} bytes, but its header describes {expected[0]:,}: it is damaged or incomplete"
        )


def _read_at(file: BinaryIO, position: int, layout: str) -> tuple[int, ...]:
    file.seek(position)
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _checked_end(offset: int, length: int) -> int:
    if offset < 0 or length < 0:
        raise ValueError("contains a negative offset or length: it is damaged")
    return offset + length
