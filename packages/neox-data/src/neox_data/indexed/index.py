"""Read and check an `.idx` file of either layout.

The arrays are views of the mapped file, so opening a dataset needs no memory for them. Counts in the header
are compared with the file's length before they are used. Checks that require a pass over all offsets are left
to `verify`; a wrong offset is detected when its sequence is read.
"""

import errno
import mmap
import resource
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.layout import (
    DISPUTED_DTYPE_CODES,
    DTYPES,
    LAYOUTS,
    MMAP_INDEX,
    VERSION,
    IndexLayout,
    bin_path,
    idx_path,
)

__all__ = ["DatasetIndex", "map_file", "read_index"]

_REMEDY = "copy the file again or create it again with preprocess_data"
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
    path, bin_file = idx_path(prefix), bin_path(prefix)
    for file in (path, bin_file):
        if not file.is_file():
            raise IndexedDatasetError(
                f"{file} does not exist; correct the prefix {str(prefix)!r}, a path without .bin or .idx, or "
                "create the data with preprocess_data",
                code="missing-file",
            )
    stats = [path.stat(), bin_file.stat()]
    bin_bytes, changed = stats[-1].st_size, max(max(each.st_mtime, each.st_ctime) for each in stats)
    stamp = [f"{each.st_ino}:{each.st_size}:{each.st_mtime_ns}:{each.st_ctime_ns}" for each in stats]
    data = map_file(path)
    layout = next((each for each in LAYOUTS if data[: len(each.magic)] == each.magic), None)
    if layout is None:
        found = "is empty" if not data else f"starts with {bytes(data[:9])!r}"
        raise IndexedDatasetError(
            f"{path} {found}, so it is not an index file; pass the prefix of files written by preprocess_data"
        )
    header = _header(path, data, layout)
    arrays = _arrays(path, data, layout, header)
    num_sequences, sizes = header["num_sequences"], arrays["sizes"]
    num_tokens = _num_tokens(path, sizes)
    dtype = _dtype(path, header["dtype_code"], num_tokens, bin_bytes)
    if header.get("token_bytes", dtype.itemsize) != dtype.itemsize:
        raise IndexedDatasetError(
            f"{path} has {header['token_bytes']} bytes per token of type {dtype}; the header is damaged: "
            f"{_REMEDY}"
        )
    if bin_bytes != num_tokens * dtype.itemsize:
        raise IndexedDatasetError(
            f"{bin_file} has {bin_bytes:,} bytes, but {path.name} describes {num_tokens:,} tokens of "
            f"{dtype.itemsize} bytes = {num_tokens * dtype.itemsize:,}; one file is truncated or belongs to "
            f"another dataset: {_REMEDY}"
        )
    _check_document_starts(path, arrays["document_starts"], num_sequences)
    return DatasetIndex(
        layout=layout.name,
        dtype=dtype,
        sizes=sizes.astype(np.int32, copy=False),
        starts=arrays["starts"][:num_sequences],
        start_bytes=header.get("token_bytes", 1),
        document_starts=arrays["document_starts"],
        num_tokens=num_tokens,
        stamp="" if time.time() - changed < _COARSEST_CLOCK_SECONDS else " ".join(stamp),
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


def _arrays(
    path: Path, data: memoryview, layout: IndexLayout, header: dict[str, int]
) -> dict[str, np.ndarray]:
    """Return the arrays behind the header by name."""
    num_sequences = header["num_sequences"]
    num_sizes = header.get("num_sizes", num_sequences)
    if num_sizes != num_sequences:
        raise IndexedDatasetError(
            f"{path} has {num_sizes:,} sizes for {num_sequences:,} sequences, so its items are not rows of "
            "tokens; create the data again with preprocess_data"
        )
    counts = {"S": num_sequences, "(N+1)": num_sequences + 1, "D": header["num_document_starts"]}
    sizes = [counts[field.count] * np.dtype(field.dtype).itemsize for field in layout.arrays]
    ends = [*accumulate(sizes, initial=layout.header_dtype.itemsize)]
    # Multimodal Megatron files append one int8 "mode" per sequence.
    if len(data) not in (ends[-1], ends[-1] + num_sequences * (layout is MMAP_INDEX)):
        relation = "truncated" if len(data) < ends[-1] else "longer than its header says"
        raise IndexedDatasetError(
            f"{path} is {relation}: it has {len(data):,} bytes, but {num_sequences:,} sequences require "
            f"{ends[-1]:,}; {_REMEDY}"
        )
    return {
        field.name: np.frombuffer(data, field.dtype, counts[field.count], begin)
        for field, begin in zip(layout.arrays, ends, strict=False)
    }


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


def _check_document_starts(path: Path, document_starts: np.ndarray, num_sequences: int) -> None:
    """Check that the first entry is 0 and the last S; GPT-NeoX's merge tool writes only [0]."""
    if not len(document_starts) or (len(document_starts) == 1 and document_starts[0] == 0):
        return
    if document_starts[0] != 0 or document_starts[-1] != num_sequences:
        raise IndexedDatasetError(
            f"{path} has a document index from {document_starts[0]:,} to {document_starts[-1]:,} instead of "
            f"0 to {num_sequences:,}; {_REMEDY}"
        )
