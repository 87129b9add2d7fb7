"""Readers that do not map the file: `lazy` reads each piece on demand, `cached` reads everything first."""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.index import DatasetIndex
from neox_data.indexed.layout import bin_path

__all__ = ["CachedIndexedDataset", "LazyIndexedDataset"]


class _TokenFile:
    """Tokens of a `.bin`, read on demand; safe for several threads."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._dtype = dtype
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, places: slice, /) -> np.ndarray:
        tokens = np.empty(places.stop - places.start, self._dtype)
        # preadv takes the position as an argument, so threads do not interfere. It may return fewer bytes.
        view, place = tokens.data.cast("B"), places.start * self._dtype.itemsize
        while len(view):
            count = os.preadv(self._descriptor, [view], place)
            if not count:
                raise IndexedDatasetError(
                    f"{self._path} was truncated while it was read; start again", code="truncated"
                )
            view, place = view[count:], place + count
        return tokens


class LazyIndexedDataset(IndexedDataset):
    """Read each piece from the open file on demand, to use little memory."""

    def __init__(self, prefix: Path | str, index: DatasetIndex) -> None:
        super().__init__(prefix, index, _TokenFile(bin_path(prefix), index.dtype))

    def check_whole(self) -> None:
        """Do nothing: reading detects a truncated file."""


class CachedIndexedDataset(IndexedDataset):
    """Read the whole `.bin` into this process's memory when the dataset is opened."""

    def __init__(self, prefix: Path | str, index: DatasetIndex) -> None:
        tokens = np.fromfile(bin_path(prefix), index.dtype)
        tokens.flags.writeable = False
        super().__init__(prefix, index, tokens)

    def check_whole(self) -> None:
        """Do nothing: the file is not read again."""
