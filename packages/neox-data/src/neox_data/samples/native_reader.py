"""A sample's tokens, read by the extension; what `GPTDataset` gives without it, in a third of the time."""

from collections.abc import Callable

import numpy as np

from neox_data.indexed.base import IndexedDataset
from neox_data.native import load_native
from neox_data.samples.build_index import SampleIndex

__all__ = ["native_sample_reader"]


def native_sample_reader(
    indexed: IndexedDataset, index: SampleIndex, *, seq_length: int
) -> Callable[[int], np.ndarray | None]:
    """From an item, its tokens, int64 [seq_length + 1].

    None where something is out of its place, or for every item where there is no extension or the tokens are
    no array of whole numbers: then the plain way reads them, or says what is wrong.
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
