"""Indexed datasets: a pair of files, `PREFIX.bin` with tokens and `PREFIX.idx` with their places."""

from collections.abc import Callable
from pathlib import Path

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.base import IndexedDataset
from neox_data.indexed.file_reader import CachedIndexedDataset, LazyIndexedDataset
from neox_data.indexed.index import DatasetIndex, read_index
from neox_data.indexed.layout import token_dtype
from neox_data.indexed.mmap_reader import MMapIndexedDataset
from neox_data.indexed.writer import IndexedDatasetWriter

__all__ = ["IMPLEMENTATIONS", "IndexedDataset", "IndexedDatasetWriter", "open_indexed", "token_dtype"]

# How the .bin is read; the layout of the .idx is known by its first bytes, so each reads both layouts.
IMPLEMENTATIONS: dict[str, Callable[[Path | str, DatasetIndex], IndexedDataset]] = {
    "mmap": MMapIndexedDataset,
    "lazy": LazyIndexedDataset,
    "cached": CachedIndexedDataset,
}


def open_indexed(
    prefix: Path | str, implementation: str = "infer", *, warmup: bool = False
) -> IndexedDataset:
    """Open the dataset `PREFIX.bin` + `PREFIX.idx`.

    Args:
        prefix: path of the two files without `.bin` and `.idx`.
        implementation: `mmap`, `lazy` or `cached`; `infer` is mmap, as the bytes of the `.bin` are the same
            in every layout.
        warmup: read the `.bin` once beforehand, to fill the page cache; only mmap has a use for it.

    Raises:
        IndexedDatasetError: a file is missing, unreadable, damaged, or belongs to another one; or no such
            implementation.
    """
    if implementation not in ("infer", *IMPLEMENTATIONS):
        raise IndexedDatasetError(
            f"data_impl {implementation!r} is not known; use infer, {', '.join(IMPLEMENTATIONS)}"
        )
    try:
        index = read_index(prefix)
        if implementation in ("infer", "mmap"):
            return MMapIndexedDataset(prefix, index, warmup=warmup)
        return IMPLEMENTATIONS[implementation](prefix, index)
    except OSError as error:
        raise IndexedDatasetError(
            f"{error.filename or prefix} cannot be read ({error.strerror}); check its permissions and its "
            "disk"
        ) from error
