"""Samples by index: `seq_length` + 1 tokens from the shuffled stream of documents."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from neox_data.errors import DataError
from neox_data.indexed.base import IndexedDataset
from neox_data.samples.index_cache import load_or_build
from neox_data.samples.native_reader import native_sample_reader

__all__ = ["GPTDataset"]


class GPTDataset:
    """The samples of one part of an indexed dataset, in GPT-NeoX's order.

    Item k depends only on the data, `documents`, `num_samples`, `seq_length` and `seed`. Items may be read by
    several threads concurrently, and several processes may construct the same dataset concurrently: one
    builds its index.

    Args:
        indexed: the tokens.
        name: name of this part, such as `train`; part of the names of the index files.
        documents: sequence numbers of this part, in file order.
        num_samples: number of samples that will be read; the dataset has at least as many.
        seq_length: tokens that a sample predicts.
        seed: random seed of the order of documents and samples.
        prefix: path of the data; the index files are in the same folder.
        cache_dir: folder of the index files if that folder is not writable; None: a folder in the user's
            cache.

    Attributes:
        num_documents: documents of this part.
        epochs: passes over the documents in the dataset.

    Raises:
        DataError: the documents have no tokens, or the index cannot be stored.
        IndexedDatasetError: the data does not have all these documents.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        name: str,
        documents: np.ndarray,
        num_samples: int,
        seq_length: int,
        seed: int,
        prefix: Path | str,
        cache_dir: Path | str | None = None,
    ) -> None:
        self.name = name
        self.indexed = indexed
        self.seq_length = seq_length
        if not len(documents):
            raise DataError(
                f"the part {name!r} of {prefix} has no documents; give it a larger share of the split, or "
                "separate data"
            )
        indexed.check_sequences(int(np.min(documents)), int(np.max(documents)))
        self.index = load_or_build(
            np.asarray(documents, dtype=np.int32),
            indexed.sizes,
            prefix=Path(prefix),
            name=name,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            stamp=indexed.index.stamp,
            cache_dir=None if cache_dir is None else Path(cache_dir),
        )
        self._read = native_sample_reader(indexed, self.index, seq_length=seq_length)
        self.num_documents = len(documents)
        self.epochs = len(self.index.documents) // self.num_documents

    def __len__(self) -> int:
        return len(self.index.shuffle)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of this part's documents."""
        return int(self.indexed.sizes[self.index.documents].sum(dtype=np.int64)) // self.epochs

    def __getitem__(self, item: int) -> np.ndarray:
        """Return the tokens of an item, int64 [seq_length + 1]: `[:-1]` is the input, `[1:]` the labels."""
        self.indexed.check_whole()
        tokens = self._read(item)
        return self.indexed.get_across(*self._span(item)) if tokens is None else tokens

    def pieces(self, item: int) -> Iterator[tuple[int, int, int]]:
        """Return the pieces of documents in an item: (sequence, first token, number of tokens).

        Raises:
            IndexError: there is no such item.
        """
        (*crossed, last), offset, end = self._span(item)
        for sequence in crossed:
            yield sequence, offset, self.indexed.sizes.item(sequence) - offset
            offset = 0
        yield last, offset, end + 1 - offset

    def _span(self, item: int) -> tuple[list[int], int, int]:
        """Return the sequences of an item, the first token in the first one, and the last in the last one."""
        index = self.index
        if not 0 <= item < len(index.shuffle):
            raise IndexError(
                f"item {item} of the part {self.name!r} of {self.indexed.prefix}, which has {len(self):,}"
            )
        sample = index.shuffle.item(item)
        (first, offset), (last, end) = index.starts[sample : sample + 2].tolist()
        return index.documents[first : last + 1].tolist(), offset, end

    def items_with(self, sequence: int) -> np.ndarray:
        """Return the sorted items with tokens of a sequence, int64; none for a sequence of another part.

        Searches the whole order once.
        """
        samples: set[int] = set()
        size, rows = self.indexed.sizes.item(sequence), self.index.starts[:, 0]
        for document in np.flatnonzero(self.index.documents == sequence).tolist() if size else ():
            # A sample ends, inclusively, where the next begins: the first one here may have begun before.
            first = max(0, bisect_left(rows, document) - 1)
            samples.update(range(first, min(len(self), bisect_right(rows, document))))
        if not samples:
            return np.empty(0, np.int64)
        return np.flatnonzero(np.isin(self.index.shuffle, np.array(sorted(samples))))
