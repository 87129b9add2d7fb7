"""Read and check an `.idx` file of either layout.

The arrays are views of the mapped file, so opening a dataset needs no memory for them. Counts in the header
are compared with the file's length before they are used. Checks that require a pass over all offsets are left
to `verify`; a wrong offset is detected when its sequence is read.
"""

import errno
import mmap
import os
import resource
import time
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any

import numpy as np

from neox_data.counted import first_few
from neox_data.errors import IndexedDatasetError
from neox_data.indexed.layout import (
    DISPUTED_DTYPE_CODES,
    DTYPES,
    LIST_INDEX,
    MMAP_INDEX,
    VERSION,
    IndexLayout,
    bin_path,
    idx_path,
)

__all__ = ["DatasetIndex", "map_file", "read_index"]

_REMEDY = "copy the file again or create it again with preprocess_data"
# Number of existing datasets suggested for an unknown prefix.
_MOST_NAMED = 4
# Times of files are as coarse as this on some file systems.
_COARSEST_CLOCK_SECONDS = 2
_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetIndex:
    """Positions and lengths of all sequences of a dataset.

    Attributes:
        layout: name of the file's layout.
        dtype: dtype of the tokens.
        sizes: int32 [S], number of tokens of each sequence.
        starts: int64 [S], position of each sequence in the `.bin`, in units of `start_bytes`.
        start_bytes: 1 if `starts` is in bytes, else the size of a token.
        document_starts: int64 [D], first sequence of each document, then S.
        num_tokens: sum of the sizes.
        stamp: state of both files, which changes with each of them; empty if they changed so recently that a
            further change might have the same time.
    """

    layout: str
    dtype: np.dtype[Any]
    sizes: np.ndarray
    starts: np.ndarray
    start_bytes: int
    document_starts: np.ndarray
    num_tokens: int
    stamp: str


def map_file(path: Path) -> memoryview:
    """Return the file's bytes, mapped read-only; empty for an empty file, which cannot be mapped.

    A mapping keeps its file open. If the process reaches its limit of open files, the limit is raised to the
    hard limit.
    """
    try:
        return _map(path)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return _map(path)


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def read_index(prefix: Path | str) -> DatasetIndex:
    """Read the index of the dataset `prefix`, and check it against the sizes of both files.

    Raises:
        IndexedDatasetError: a file is missing, damaged, or belongs to another dataset.
    """
    path, stats = idx_path(prefix), _stats(prefix)
    bin_bytes, stamp = stats[-1].st_size, _stamp(stats)
    data = map_file(path)
    if data[: len(MMAP_INDEX.magic)] == MMAP_INDEX.magic:
        return _read_mmap_index(path, data, bin_bytes, stamp)
    if data[: len(LIST_INDEX.magic)] == LIST_INDEX.magic:
        return _read_list_index(path, data, bin_bytes, stamp)
    found = "is empty" if not data else f"starts with {bytes(data[:9])!r}"
    raise IndexedDatasetError(
        f"{path} {found}, so it is not an index file; pass the prefix of files written by preprocess_data"
    )


def _stats(prefix: Path | str) -> list[os.stat_result]:
    """Return the states of the `.idx` and the `.bin`."""
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise IndexedDatasetError(
                f"{path} does not exist; correct the prefix {str(prefix)!r}{_hint(str(prefix))} or create "
                "the data with preprocess_data"
            )
    return [idx_path(prefix).stat(), bin_path(prefix).stat()]


def _stamp(stats: list[os.stat_result]) -> str:
    changed = max(max(each.st_mtime, each.st_ctime) for each in stats)
    if time.time() - changed < _COARSEST_CLOCK_SECONDS:
        return ""
    return " ".join(f"{each.st_ino}:{each.st_size}:{each.st_mtime_ns}:{each.st_ctime_ns}" for each in stats)


def _hint(prefix: str) -> str:
    if prefix.endswith((".bin", ".idx")):
        return " (pass the prefix without the ending)"
    begin = f"{prefix}/" if Path(prefix).is_dir() else prefix
    found = (path.removesuffix(".idx") for path in sorted(glob(f"{escape(begin)}*.idx")))
    near = [each for each in found if each != prefix]
    return f" (there is {first_few(near, _MOST_NAMED)})" if near else ""


def _read_mmap_index(path: Path, data: memoryview, bin_bytes: int, stamp: str) -> DatasetIndex:
    header = _header(path, data, MMAP_INDEX)
    num_sequences, num_starts = header["num_sequences"], header["num_document_starts"]
    start = MMAP_INDEX.header_dtype.itemsize
    expected = start + 12 * num_sequences + 8 * num_starts
    # Multimodal Megatron files append one int8 "mode" per sequence.
    if len(data) not in (expected, expected + num_sequences):
        raise _wrong_length(path, len(data), expected, num_sequences)
    sizes = np.frombuffer(data, "<i4", num_sequences, start)
    starts = np.frombuffer(data, "<i8", num_sequences, start + 4 * num_sequences)
    document_starts = np.frombuffer(data, "<i8", num_starts, start + 12 * num_sequences)
    num_tokens = _num_tokens(path, sizes)
    dtype = _dtype(path, header["dtype_code"], num_tokens, bin_bytes)
    _check_bin(path, num_tokens, dtype, bin_bytes)
    _check_document_starts(path, document_starts, num_sequences)
    return DatasetIndex(
        layout=MMAP_INDEX.name,
        dtype=dtype,
        sizes=sizes,
        starts=starts,
        start_bytes=1,
        document_starts=document_starts,
        num_tokens=num_tokens,
        stamp=stamp,
    )


def _read_list_index(path: Path, data: memoryview, bin_bytes: int, stamp: str) -> DatasetIndex:
    header = _header(path, data, LIST_INDEX)
    num_sequences, num_sizes = header["num_sequences"], header["num_sizes"]
    num_starts = header["num_document_starts"]
    if num_sizes != num_sequences:
        raise IndexedDatasetError(
            f"{path} has {num_sizes:,} sizes for {num_sequences:,} sequences, so its items are not rows of "
            "tokens; create the data again with preprocess_data"
        )
    start = LIST_INDEX.header_dtype.itemsize
    expected = start + 8 * (3 * num_sequences + 2 + num_starts)
    if len(data) != expected:
        raise _wrong_length(path, len(data), expected, num_sequences)
    data_offsets = np.frombuffer(data, "<i8", num_sequences + 1, start + 8 * (num_sequences + 1))
    sizes = np.frombuffer(data, "<i8", num_sequences, start + 16 * (num_sequences + 1))
    document_starts = np.frombuffer(data, "<i8", num_starts, expected - 8 * num_starts)
    num_tokens = _num_tokens(path, sizes)
    dtype = _dtype(path, header["dtype_code"], num_tokens, bin_bytes)
    if header["token_bytes"] != dtype.itemsize:
        raise IndexedDatasetError(
            f"{path} has {header['token_bytes']} bytes per token of type {dtype}; the header is damaged: "
            f"{_REMEDY}"
        )
    _check_bin(path, num_tokens, dtype, bin_bytes)
    _check_document_starts(path, document_starts, num_sequences)
    return DatasetIndex(
        layout=LIST_INDEX.name,
        dtype=dtype,
        sizes=sizes.astype(np.int32),
        starts=data_offsets[:-1],
        start_bytes=dtype.itemsize,
        document_starts=document_starts,
        num_tokens=num_tokens,
        stamp=stamp,
    )


def _header(path: Path, data: memoryview, layout: IndexLayout) -> dict[str, int]:
    """Return the header's numbers by name."""
    record = layout.header_dtype
    if len(data) < record.itemsize:
        raise IndexedDatasetError(
            f"{path} ends after {len(data)} bytes, in the middle of its header of {record.itemsize}; "
            f"{_REMEDY}"
        )
    values = np.frombuffer(data, record, 1)[0]
    header = {field.name: int(values[field.name]) for field in layout.header if field.name != "magic"}
    if header["version"] != VERSION:
        raise IndexedDatasetError(
            f"{path} has version {header['version']}, but only version {VERSION} is supported; "
            f"create the data again with preprocess_data"
        )
    return header


def _wrong_length(path: Path, found: int, expected: int, num_sequences: int) -> IndexedDatasetError:
    relation = "truncated" if found < expected else "longer than its header says"
    return IndexedDatasetError(
        f"{path} is {relation}: it has {found:,} bytes, but {num_sequences:,} sequences require "
        f"{expected:,}; {_REMEDY}"
    )


def _num_tokens(path: Path, sizes: np.ndarray) -> int:
    if not len(sizes):
        return 0
    least, most = int(sizes.min()), int(sizes.max())
    if least < 0 or most > _INT32_MAX:
        bad = int(sizes.argmin() if least < 0 else sizes.argmax())
        raise IndexedDatasetError(
            f"{path} has an invalid length of {int(sizes[bad]):,} tokens for sequence {bad:,}; {_REMEDY}"
        )
    return int(sizes.sum(dtype=np.int64))


def _dtype(path: Path, code: int, num_tokens: int, bin_bytes: int) -> np.dtype[Any]:
    if code in DTYPES:
        return DTYPES[code]
    if code in DISPUTED_DTYPE_CODES:
        for candidate in (np.dtype("<f4"), np.dtype("<f8")):
            if num_tokens and num_tokens * candidate.itemsize == bin_bytes:
                return candidate
        raise IndexedDatasetError(
            f"{path} has dtype code {code}, which some programs write for float32 and others for float64, "
            f"but the .bin file of {bin_bytes:,} bytes for {num_tokens:,} tokens matches neither; {_REMEDY}"
        )
    raise IndexedDatasetError(
        f"{path} has the unknown dtype code {code}; supported codes are "
        f"{', '.join(f'{key} ({value.name})' for key, value in DTYPES.items())}; "
        f"{_REMEDY}"
    )


def _check_bin(path: Path, num_tokens: int, dtype: np.dtype[Any], bin_bytes: int) -> None:
    expected = num_tokens * dtype.itemsize
    if bin_bytes != expected:
        raise IndexedDatasetError(
            f"{path.with_suffix('.bin')} has {bin_bytes:,} bytes, but {path.name} describes {num_tokens:,} "
            "tokens of "
            f"{dtype.itemsize} bytes = {expected:,}; one file is truncated or belongs to another dataset: "
            f"{_REMEDY}"
        )


def _check_document_starts(path: Path, document_starts: np.ndarray, num_sequences: int) -> None:
    """Check that the first entry is 0 and the last S; GPT-NeoX's merge tool writes only [0]."""
    if not len(document_starts) or (len(document_starts) == 1 and document_starts[0] == 0):
        return
    if document_starts[0] != 0 or document_starts[-1] != num_sequences:
        raise IndexedDatasetError(
            f"{path} has a document index from {document_starts[0]:,} to {document_starts[-1]:,} instead of "
            f"0 to {num_sequences:,}; {_REMEDY}"
        )
