"""Labels next to tokens: a second indexed dataset with one label per token; negative ones do not count.

The layout is GPT-NeoX's: document d of the labels has the length of document d of the tokens, and label t is
token t, or -100 if the loss must not count its prediction. Labels are not shifted.
"""

from collections.abc import Callable, Iterator

import numpy as np

from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed.base import IndexedDataset
from neox_data.lazy_dataset import LazyGPTDataset
from neox_data.pluralize import pluralize

__all__ = ["LabelledDataset", "check_labels"]

_AGAIN = "create both again in one run of preprocess_data --loss-mask"


def check_labels(tokens: IndexedDataset, labels: IndexedDataset) -> None:
    """Check that there is one label per token, and that labels can be negative.

    Raises:
        DataError: the labels are not those of these tokens.
    """
    if labels.dtype.kind != "i":
        raise DataError(
            f"the labels {labels.prefix} are stored as {labels.dtype}, which has no negative numbers, but "
            f"labels that do not count are -100; {_AGAIN}"
        )
    if not np.array_equal(tokens.sizes, labels.sizes):
        shared, different = min(len(labels), len(tokens)), ""
        for number in np.flatnonzero(labels.sizes[:shared] != tokens.sizes[:shared])[:1].tolist():
            sizes = labels.sizes.item(number), tokens.sizes.item(number)
            different = (
                f": document {number} has {pluralize(sizes[0], 'label')}, {pluralize(sizes[1], 'token')}"
            )
        raise DataError(
            f"the labels {labels.prefix} ({pluralize(len(labels), 'document')}, "
            f"{pluralize(labels.num_tokens, 'label')}) are not one for each token of {tokens.prefix} "
            f"({pluralize(len(tokens), 'document')}, {pluralize(tokens.num_tokens, 'token')})"
            f"{different}; name the labels of this dataset, or {_AGAIN}"
        )


class LabelledDataset:
    """The items of a dataset, each with its labels.

    Args:
        build: builds the dataset from the tokens, and the same items from the labels.
        tokens: the tokens.
        labels: one label per token.

    Raises:
        DataError: the labels are not those of the tokens.
    """

    def __init__(
        self,
        build: Callable[[IndexedDataset], GPTDataset | LazyGPTDataset],
        tokens: IndexedDataset,
        labels: IndexedDataset,
    ) -> None:
        check_labels(tokens, labels)
        self._tokens = build(tokens)
        self._labels = build(labels)
        self.indexed = tokens
        self.name = self._tokens.name
        self.seq_length = self._tokens.seq_length
        self.num_documents = self._tokens.num_documents
        self.num_tokens = self._tokens.num_tokens
        self.epochs = self._tokens.epochs

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, item: int) -> np.ndarray:
        """Return tokens and labels of an item, int64 [2, seq_length + 1]."""
        return np.stack([self._tokens[item], self._labels[item]])

    def pieces(self, item: int) -> Iterator[tuple[int, int, int]]:
        """Return the pieces of documents in an item: (sequence, first token, number of tokens)."""
        return self._tokens.pieces(item)

    def items_with(self, sequence: int) -> np.ndarray:
        """Return the sorted items with tokens of a sequence, int64."""
        return self._tokens.items_with(sequence)
