"""Samples in an order that is computed, not built: no index, no files, the same at any size.

One pass over the data lays the documents end to end as they lie in the file and cuts windows of `seq_length`
tokens; a keyed permutation says which is read when. Each pass has a permutation of its own, and begins to cut
at another token. This is not GPT-NeoX's order: runs that shall repeat one of its runs use `GPTDataset`.
"""

from collections.abc import Iterator

import numpy as np

from neox_data.errors import DataError
from neox_data.indexed.base import IndexedDataset
from neox_data.samples.permutation import KeyedPermutation

__all__ = ["LazyGPTDataset"]


class LazyGPTDataset:
    """The samples of one part of an indexed dataset, in an order that costs nothing to find.

    Item k depends on nothing but the data, `documents`, `name`, `seq_length` and `seed`: not on the number of
    samples or ranks, and not on the batch. Items may be read from several threads at once.

    Args:
        indexed: the tokens.
        name: of this part, as in `train`; parts of different names are shuffled differently.
        documents: sequence numbers of this part, consecutive.
        num_samples: samples that will be asked for; the dataset holds at least as many, in whole passes.
        seq_length: tokens that a sample predicts.
        seed: for the order.

    Attributes:
        num_documents: documents of this part.
        num_tokens: tokens of them.
        epochs: passes over them that the dataset is made of.
        samples_per_epoch: samples of one pass.

    Raises:
        DataError: the documents hold too few tokens for one sample, or do not lie one after another.
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
        self._first, num_tokens = indexed.token_range(documents)
        self.num_tokens = num_tokens
        self.samples_per_epoch = (num_tokens - 1) // seq_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"the part {name!r} of {indexed.prefix} has {num_tokens:,} tokens, and one sample needs "
                f"{seq_length + 1:,}; use more data or a smaller seq_length"
            )
        self._spare = num_tokens - 1 - self.samples_per_epoch * seq_length
        self.epochs = max(1, -(-num_samples // self.samples_per_epoch))
        self._length = self.epochs * self.samples_per_epoch
        self._key = f"{seed} {name}"
        self._epoch = self._order(0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> np.ndarray:
        """The tokens of an item, int64 [seq_length + 1]: `[:-1]` is the input, `[1:]` the labels."""
        return self.indexed.get_tokens(self.first_token(item), self.seq_length + 1).astype(np.int64)

    def first_token(self, item: int) -> int:
        """Where an item begins, counted in tokens of the `.bin`.

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < self._length:
            raise IndexError(
                f"item {item} of the part {self.name!r} of {self.indexed.prefix}, which has {self._length:,}"
            )
        epoch, place = divmod(item, self.samples_per_epoch)
        # Replaced as a whole, so that a thread never sees one epoch's number with another's order.
        if self._epoch[0] != epoch:
            self._epoch = self._order(epoch)
        number, offset, permutation = self._epoch
        if number != epoch:
            _, offset, permutation = self._order(epoch)
        return self._first + offset + permutation[place] * self.seq_length

    def pieces(self, item: int) -> Iterator[tuple[int, int, int]]:
        """The pieces of documents that an item is made of: sequence, first token, number of tokens."""
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
        """The items that hold a token of a sequence, in rising order, int64; none for one of another part."""
        size = self.indexed.sizes.item(sequence)
        if sequence not in self._documents or not size:
            return np.empty(0, np.int64)
        items = []
        for epoch in range(self.epochs):
            _, offset, permutation = self._order(epoch)
            begin = self.indexed.first_token(sequence) - self._first - offset
            # Window w holds the tokens w * seq_length to (w + 1) * seq_length, both included.
            first = max(0, -(-(begin - self.seq_length) // self.seq_length))
            last = min(self.samples_per_epoch - 1, (begin + size - 1) // self.seq_length)
            windows = range(first, last + 1)
            items += [epoch * self.samples_per_epoch + permutation.index(window) for window in windows]
        return np.array(sorted(items), np.int64)

    def _order(self, epoch: int) -> tuple[int, int, KeyedPermutation]:
        offset = KeyedPermutation(self._spare + 1, f"{self._key} {epoch} offset")[0]
        return epoch, offset, KeyedPermutation(self.samples_per_epoch, f"{self._key} {epoch}")
