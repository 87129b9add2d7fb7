"""Corpora for language models: tokenizers, memory-mapped datasets, samples and blends."""

from neox_data.errors import CorpusError, DataError, IndexedDatasetError, TokenizerError

__all__ = ["CorpusError", "DataError", "IndexedDatasetError", "TokenizerError"]
