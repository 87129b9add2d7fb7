"""Samples in a computed order, without index or files, the same for any number of samples.

One pass over the data concatenates the documents in file order and cuts windows of `seq_length` tokens; a
keyed permutation determines their order. Each pass has a separate permutation, and starts at a different
token. This is not GPT-NeoX's order: to repeat its runs, use `GPTDataset`.
"""

from collections.abc import Iterator

import numpy as np

from neox_data.errors import DataError
from neox_data.indexed.base import IndexedDataset
from neox_data.pluralize import pluralize
from neox_data.samples.permutation import KeyedPermutation

__all__ = ["LazyGPTDataset"]


class LazyGPTDataset:
    """The samples of one part of an indexed dataset, in a computed order.

    Item k depends only on the data, `documents`, `name`, `seq_length` and `seed`, not on the number of
    samples or ranks, nor on the batch. Items may be read by several threads concurrently.

    Args:
        indexed: the tokens.
        name: name of this part, such as `train`; parts with different names are shuffled differently.
        documents: sequence numbers of this part, consecutive.
        num_samples: number of samples that will be read; the dataset has at least as many, in whole passes.
        seq_length: tokens that a sample predicts.
        seed: random seed of the order.

    Attributes:
        num_documents: documents of this part.
        num_tokens: tokens of these documents.
        epochs: passes over the documents in the dataset.
        samples_per_epoch: samples of one pass.

    Raises:
        DataError: the documents have too few tokens for one sample, or are not consecutive in the file.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        name: str,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
    ) -> None:
        self.name = name
        self.indexed = indexed
        self.seq_length = seq_length
        self._documents = documents
        self.num_documents = len(documents)
        if documents:
            # Not min and max, which visit every number of a range.
            first, last = sorted((documents[0], documents[-1]))
            indexed.check_sequences(first, last)
        self._first, num_tokens = indexed.token_range(documents)
        self.num_tokens = num_tokens
        self.samples_per_epoch = (num_tokens - 1) // seq_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"the part {name!r} of {indexed.prefix} has {pluralize(num_tokens, 'token')}, but one "
                f"sample requires {seq_length + 1:,}; use more data or a smaller seq_length",
                code="too-short",
            )
        self._spare = num_tokens - 1 - self.samples_per_epoch * seq_length
        self.epochs = max(1, -(-num_samples // self.samples_per_epoch))
        self._length = self.epochs * self.samples_per_epoch
        self._key = f"{seed} {name}"
        self._epoch = self._order(0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> np.ndarray:
        """Return the tokens of an item, int64 [seq_length + 1]: `[:-1]` is the input, `[1:]` the labels."""
        return self.indexed.get_tokens(self.first_token(item), self.seq_length + 1).astype(np.int64)

    def first_token(self, item: int) -> int:
        """Return the start of an item, in tokens of the `.bin`.

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < self._length:
            raise IndexError(
                f"item {item} of the part {self.name!r} of {self.indexed.prefix}, which has {self._length:,}"
            )
        epoch, place = divmod(item, self.samples_per_epoch)
        # Replaced as one object, so that a thread never sees one epoch's number with another's order.
        if self._epoch[0] != epoch:
            self._epoch = self._order(epoch)
        number, offset, permutation = self._epoch
        if number != epoch:
            _, offset, permutation = self._order(epoch)
        return self._first + offset + permutation[place] * self.seq_length

    def pieces(self, item: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of documents in an item: (sequence, first token, number of tokens)."""
        begin = self.first_token(item)
        end = begin + self.seq_length + 1
        sequence = self.indexed.sequence_at(begin, self._documents)
        while begin < end:
            start, size = self.indexed.first_token(sequence), self.indexed.sizes.item(sequence)
            if size:
                length = min(start + size, end) - begin
                yield sequence, begin - start, length
                begin += length
            sequence += 1

    def items_with(self, sequence: int) -> np.ndarray:
        """Return the sorted items with tokens of a sequence, int64; none for a sequence of another part."""
        size = self.indexed.sizes.item(sequence)
        if sequence not in self._documents or not size:
            return np.empty(0, np.int64)
        items = []
        for epoch in range(self.epochs):
            _, offset, permutation = self._order(epoch)
            begin = self.indexed.first_token(sequence) - self._first - offset
            # Window w contains the tokens w * seq_length to (w + 1) * seq_length, inclusive.
            first = max(0, -(-(begin - self.seq_length) // self.seq_length))
            last = min(self.samples_per_epoch - 1, (begin + size - 1) // self.seq_length)
            windows = range(first, last + 1)
            items += [epoch * self.samples_per_epoch + permutation.index(window) for window in windows]
        return np.array(sorted(items), np.int64)

    def _order(self, epoch: int) -> tuple[int, int, KeyedPermutation]:
        offset = KeyedPermutation(self._spare + 1, f"{self._key} {epoch} offset")[0]
        return epoch, offset, KeyedPermutation(self.samples_per_epoch, f"{self._key} {epoch}")
