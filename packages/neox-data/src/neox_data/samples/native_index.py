"""Compiled versions of the slow functions of `build_index`, with identical results."""

from types import ModuleType

import numpy as np

from neox_data.native import load_native
from neox_data.samples.build_index import NUMPY, IndexBuilder, sample_dtype

__all__ = ["best_builder", "native_builder"]


def best_builder() -> IndexBuilder:
    """Return the native builder if the extension is compiled, else numpy's."""
    extension = load_native()
    return NUMPY if extension is None else native_builder(extension)


def native_builder(extension: ModuleType) -> IndexBuilder:
    """Return the builder implemented by the extension."""

    def count_tokens(documents: np.ndarray, sizes: np.ndarray) -> int:
        tokens: int = extension.count_tokens(documents, np.ascontiguousarray(sizes, np.int32))
        return tokens

    def sample_starts(stream: np.ndarray, sizes: np.ndarray, count: int, seq_length: int) -> np.ndarray:
        starts = np.empty((count + 1, 2), dtype=sample_dtype(len(stream)))
        extension.sample_starts(stream, np.ascontiguousarray(sizes, np.int32), starts, seq_length)
        return starts

    return IndexBuilder(extension.MersenneTwister, count_tokens, sample_starts)
