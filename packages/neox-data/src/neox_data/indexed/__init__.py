"""Indexed datasets: pairs of files, `PREFIX.bin` with the tokens and `PREFIX.idx` with the sequences."""

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

# Readers of the .bin. Each supports both layouts of the .idx, which its first bytes identify.
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
        implementation: `mmap`, `lazy` or `cached`; `infer` selects mmap, because the `.bin` is the same in
            every layout.
        warmup: read the whole `.bin` first, to fill the page cache; mmap only.

    Raises:
        IndexedDatasetError: a file is missing, unreadable, damaged or belongs to another dataset, or the
            implementation is unknown.
    """
    if implementation not in ("infer", *IMPLEMENTATIONS):
        raise IndexedDatasetError(
            f"unknown data_impl {implementation!r}; use infer, {', '.join(IMPLEMENTATIONS)}"
        )
    try:
        index = read_index(prefix)
        if implementation in ("infer", "mmap"):
            return MMapIndexedDataset(prefix, index, warmup=warmup)
        return IMPLEMENTATIONS[implementation](prefix, index)
    except OSError as error:
        raise IndexedDatasetError(
            f"cannot read {error.filename or prefix} ({error.strerror}); check its permissions and its disk",
            code="not-readable",
        ) from error
