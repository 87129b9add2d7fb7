"""Readers for where mapping a file is unwelcome: `lazy` reads each piece when asked, `cached` all at once."""

import os
import weakref
from pathlib import Path

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.index import DatasetIndex
from neox_data.indexed.layout import bin_path

__all__ = ["CachedIndexedDataset", "LazyIndexedDataset"]


class LazyIndexedDataset(IndexedDataset):
    """Reads each piece from the file when it is asked for; the file stays open, the memory stays free."""

    def __init__(self, prefix: Path | str, index: DatasetIndex) -> None:
        super().__init__(prefix, index)
        self._descriptor = os.open(bin_path(prefix), os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def _check_whole(self) -> None:
        """Reading finds out."""

    def _read(self, first: int, length: int) -> np.ndarray:
        tokens = np.empty(length, self.dtype)
        # preadv carries its own position, so threads do not disturb each other; it may return less than
        # asked.
        view, place = tokens.data.cast("B"), first * self.dtype.itemsize
        while len(view):
            count = os.preadv(self._descriptor, [view], place)
            if not count:
                raise IndexedDatasetError(
                    f"{bin_path(self.prefix)} became shorter while it was read; start again"
                )
            view, place = view[count:], place + count
        return tokens


class CachedIndexedDataset(IndexedDataset):
    """Holds the whole `.bin` in this process's memory from the start."""

    def __init__(self, prefix: Path | str, index: DatasetIndex) -> None:
        super().__init__(prefix, index)
        self._tokens = np.fromfile(bin_path(prefix), self.dtype)
        self._tokens.flags.writeable = False

    def _check_whole(self) -> None:
        """The file is not read any more."""

    def _read(self, first: int, length: int) -> np.ndarray:
        return self._tokens[first : first + length]
