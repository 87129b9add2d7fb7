"""The default reader: tokens straight from the mapped `.bin`, which all processes share in the page cache."""

from pathlib import Path
from typing import Any

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.index import DatasetIndex, map_file
from neox_data.indexed.layout import bin_path

__all__ = ["MMapIndexedDataset"]

_WARMUP_BYTES = 1 << 24


class MMapIndexedDataset(IndexedDataset):
    """Sequences as read-only views of the mapped file; nothing is copied.

    Args:
        prefix: path of the two files without `.bin` and `.idx`.
        index: the checked index.
        warmup: read the whole `.bin` once, so that later reads find it in the page cache.
    """

    def __init__(self, prefix: Path | str, index: DatasetIndex, *, warmup: bool = False) -> None:
        path = bin_path(prefix)
        if warmup:
            _fill_page_cache(path)
        mapped = map_file(path)
        # A plain array over the mapping: slicing np.memmap costs several times as much.
        super().__init__(prefix, index, np.frombuffer(mapped, index.dtype))
        self._size = mapped.nbytes
        self._mapping: Any = mapped.obj

    def check_whole(self) -> None:
        """A read behind the end of a mapped file would kill the process, without a word."""
        if self._size and self._mapping.size() < self._size:
            raise IndexedDatasetError(
                f"{bin_path(self.prefix)} became shorter while it was read; copy it again and start again"
            )


def _fill_page_cache(path: Path) -> None:
    block = bytearray(_WARMUP_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
