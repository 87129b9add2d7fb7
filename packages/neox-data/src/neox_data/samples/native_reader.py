"""Read the tokens of a sample with the extension: three times as fast as `GPTDataset` without it."""

from collections.abc import Callable

import numpy as np

from neox_data.indexed.base import IndexedDataset
from neox_data.native import load_native
from neox_data.samples.build_index import SampleIndex

__all__ = ["native_sample_reader"]


def native_sample_reader(
    indexed: IndexedDataset, index: SampleIndex, *, seq_length: int
) -> Callable[[int], np.ndarray | None]:
    """Return a function from an item to its tokens, int64 [seq_length + 1].

    It returns None if the index is inconsistent, and always without the extension or without an array of
    integer tokens. The Python implementation then reads the tokens or reports the error.
    """
    extension, tokens = load_native(), indexed.token_array
    if extension is None or tokens is None or tokens.dtype.kind not in "iu":
        return lambda item: None
    reader = extension.SampleReader(
        tokens,
        tokens.dtype.kind == "i",
        np.ascontiguousarray(indexed.index.starts),
        indexed.index.start_bytes,
        indexed.sizes,
        index.documents,
        index.starts,
        index.shuffle,
        seq_length + 1,
    )
    read: Callable[[int], np.ndarray | None] = reader.read
    return read
