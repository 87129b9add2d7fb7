"""Readers for where mapping a file is unwelcome: `lazy` reads each piece when asked, `cached` all at once."""

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
    """Tokens of a `.bin`, read when they are asked for; from several threads at once."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._dtype = dtype
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, places: slice, /) -> np.ndarray:
        tokens = np.empty(places.stop - places.start, self._dtype)
        # preadv carries its own position, so threads do not disturb each other; it may return less than
        # asked.
        view, place = tokens.data.cast("B"), places.start * self._dtype.itemsize
        while len(view):
            count = os.preadv(self._descriptor, [view], place)
            if not count:
                raise IndexedDatasetError(f"{self._path} became shorter while it was read; start again")
            view, place = view[count:], place + count
        return tokens


class LazyIndexedDataset(IndexedDataset):
    """Reads each piece from the file when it is asked for; the file stays open, the memory stays free."""

    def __init__(self, prefix: Path | str, index: DatasetIndex) -> None:
        super().__init__(prefix, index, _TokenFile(bin_path(prefix), index.dtype))

    def check_whole(self) -> None:
        """Reading finds out."""


class CachedIndexedDataset(IndexedDataset):
    """Holds the whole `.bin` in this process's memory from the start."""

    def __init__(self, prefix: Path | str, index: DatasetIndex) -> None:
        tokens = np.fromfile(bin_path(prefix), index.dtype)
        tokens.flags.writeable = False
        super().__init__(prefix, index, tokens)

    def check_whole(self) -> None:
        """The file is not read any more."""
