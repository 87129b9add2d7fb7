"""The default reader: maps the `.bin`, which all processes share in the page cache."""

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
    """Return sequences as read-only views of the mapped file, without copies.

    Args:
        prefix: path of the two files without `.bin` and `.idx`.
        index: the checked index.
        warmup: read the whole `.bin` once, to fill the page cache.
    """

    def __init__(self, prefix: Path | str, index: DatasetIndex, *, warmup: bool = False) -> None:
        path = bin_path(prefix)
        if warmup:
            block = bytearray(_WARMUP_BYTES)
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        mapped = map_file(path)
        # Slicing a plain array is several times faster than slicing np.memmap.
        super().__init__(prefix, index, np.frombuffer(mapped, index.dtype))
        self._size = mapped.nbytes
        self._mapping: Any = mapped.obj

    def check_whole(self) -> None:
        """Raise if the file has become shorter: reading behind its end would kill the process by SIGBUS."""
        if self._size and self._mapping.size() < self._size:
            raise IndexedDatasetError(
                f"{bin_path(self.prefix)} was truncated while it was read; copy it again and restart",
                code="truncated",
            )
