"""Full check of an indexed dataset, including what opening it does not check."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.index import map_file, read_index
from neox_data.indexed.layout import bin_path, idx_path
from neox_data.indexed.mmap_reader import MMapIndexedDataset

__all__ = ["verify_indexed"]

_CHUNK = 1 << 22


def verify_indexed(prefix: Path | str) -> IndexedDataset:
    """Check a whole dataset and return it.

    Raises:
        IndexedDatasetError: the dataset is damaged; the message describes the first error.
    """
    dataset = MMapIndexedDataset(prefix, read_index(prefix))
    index, expected, starts = dataset.index, 0, dataset.document_starts
    unit = index.dtype.itemsize // index.start_bytes
    for chunk in _chunks(len(dataset)):
        sizes = index.sizes[chunk].astype(np.int64) * unit
        ends = expected + np.cumsum(sizes)
        wrong = np.flatnonzero(index.starts[chunk] != ends - sizes)
        if wrong.size:
            place = chunk.start + int(wrong[0])
            raise _fault(
                idx_path(prefix), f"sequence {place:,} does not start at the end of the previous one"
            )
        expected = int(ends[-1])
    for chunk in _chunks(len(starts)):
        part = starts[chunk.start : chunk.stop + 1]
        if (np.diff(part) < 0).any() or (part < 0).any():
            raise _fault(idx_path(prefix), "the document index does not increase")
    if dataset.dtype.kind != "i":
        return dataset
    tokens = np.frombuffer(map_file(bin_path(prefix)), dataset.dtype)
    for chunk in _chunks(len(tokens)):
        if (tokens[chunk] < 0).any():
            place = chunk.start + int(np.argmax(tokens[chunk] < 0))
            raise _fault(bin_path(prefix), f"token {place:,} is negative ({int(tokens[place])})")
    return dataset


def _chunks(length: int) -> Iterator[slice]:
    for first in range(0, length, _CHUNK):
        yield slice(first, min(first + _CHUNK, length))


def _fault(path: Path, what: str) -> IndexedDatasetError:
    return IndexedDatasetError(f"{path}: {what}; copy the file again or create it again with preprocess_data")
