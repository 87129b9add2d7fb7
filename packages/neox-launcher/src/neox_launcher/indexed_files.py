"""Whether a dataset's two files belong together and are whole, from their headers and sizes alone.

The launcher looks before it starts workers, and it has no numpy; reading the data is neox-data's work.
"""

import struct
from pathlib import Path
from typing import BinaryIO

__all__ = ["check_indexed_files"]

_MMAP_MAGIC = b"MMIDIDX\x00\x00"
_MMAP_HEADER = struct.Struct("<9sQBQQ")
_OLDER_MAGIC = b"TNTIDX\x00\x00"
_OLDER_HEADER = struct.Struct("<8sQQQQQQ")
_VERSION = 1

# Bytes of a token by dtype code. Codes 6 and 7 mean different things to different writers.
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
_DISPUTED_CODES = (6, 7)


def check_indexed_files(prefix: str) -> str | None:
    """What is wrong with `PREFIX.idx` and `PREFIX.bin`, in one sentence; None when nothing is.

    Costs the reading of a few dozen bytes, however large the files are.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            return f"{path} does not exist"
    try:
        with index.open("rb") as file:
            needed = _bytes_of_data(file, index.stat().st_size)
    except (OSError, ValueError) as error:
        return f"{index} {error}"
    present = data.stat().st_size
    if needed is not None and present < needed:
        return f"{data} holds {present:,} bytes, but its index describes {needed:,}: it is not complete"
    return None


def _bytes_of_data(file: BinaryIO, size: int) -> int | None:
    """Bytes that the index describes; None where the dtype is disputed. ValueError says what is wrong."""
    magic = file.read(len(_MMAP_MAGIC))
    file.seek(0)
    if magic == _MMAP_MAGIC:
        return _mmap_layout(file, size)
    if magic.startswith(_OLDER_MAGIC):
        return _older_layout(file, size)
    raise ValueError("is no index of a dataset: it starts with other bytes than preprocess_data writes")


def _mmap_layout(file: BinaryIO, size: int) -> int | None:
    if size < _MMAP_HEADER.size:
        raise ValueError(f"ends after {size} bytes, inside its header")
    _, version, code, sequences, documents = _MMAP_HEADER.unpack(file.read(_MMAP_HEADER.size))
    _check_version(version)
    expected = _MMAP_HEADER.size + 12 * sequences + 8 * documents
    # Some writers add a byte per sequence.
    _check_size(size, (expected, expected + sequences))
    if code not in _ITEM_BYTES and code not in _DISPUTED_CODES:
        raise ValueError(f"names a dtype with the code {code}, which does not exist")
    if not sequences:
        raise ValueError("describes no documents")
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
        raise ValueError(f"has version {version:,}; only version {_VERSION} is known")


def _check_size(size: int, expected: tuple[int, ...]) -> None:
    if size not in expected:
        raise ValueError(
            f"holds {size:,} bytes, but its header describes {expected[0]:,}: it is damaged or not complete"
        )


def _read_at(file: BinaryIO, position: int, layout: str) -> tuple[int, ...]:
    file.seek(position)
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _checked_end(offset: int, length: int) -> int:
    if offset < 0 or length < 0:
        raise ValueError("describes a negative place in the data: it is damaged")
    return offset + length
