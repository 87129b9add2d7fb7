"""Documents -> fixed-length samples, in the order of GPT-NeoX, token for token.

The documents are repeated for as many epochs as the samples need, shuffled as a whole and laid end to end;
sample i is tokens i*L to i*L + L of that stream, and the samples are shuffled once more. No Python loop: a
sample's place is found by binary search in the running sum of the lengths. `native_index` holds the compiled
twins of the two functions that take time.

Source: GPT-NeoX's and Megatron-LM's dataset order, as docs/formats.md states it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from neox_data.errors import DataError

__all__ = [
    "NUMPY",
    "IndexBuilder",
    "SampleIndex",
    "build_sample_index",
    "num_epochs",
    "num_samples_in",
    "sample_dtype",
    "shuffle_dtype",
]

_INT32_MAX = np.iinfo(np.int32).max
_UINT32_MAX = np.iinfo(np.uint32).max


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The order of one dataset's samples.

    Attributes:
        documents: int32 [documents * epochs], sequence numbers in the order of the token stream (`doc_idx`).
        starts: int32 or int64 [N + 1, 2], where each sample begins, and where the last one's last token is:
            index into `documents`, token within that document (`sample_idx`).
        shuffle: uint32 or int64 [N], item k is sample `shuffle[k]` (`shuffle_idx`).
    """

    documents: np.ndarray
    starts: np.ndarray
    shuffle: np.ndarray


class Shuffler(Protocol):
    """A generator that shuffles arrays in place, as `numpy.random.RandomState` does."""

    def shuffle(self, values: np.ndarray, /) -> None: ...


@dataclass(frozen=True, slots=True)
class IndexBuilder:
    """How the steps that take time are done; every builder gives the same.

    Attributes:
        shuffler: from a seed, the generator `numpy.random.RandomState(seed)` or its equal.
        count_tokens: from sequence numbers and the sizes of all sequences, the tokens of these.
        sample_starts: from the stream of documents, the sizes of all sequences, the number of samples and the
            sequence length, what `SampleIndex.starts` holds.
    """

    shuffler: Callable[[int], Shuffler]
    count_tokens: Callable[[np.ndarray, np.ndarray], int]
    sample_starts: Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


def num_epochs(tokens_per_epoch: int, *, num_samples: int, seq_length: int) -> int:
    """The fewest passes over the documents that give `num_samples` samples, at least one.

    Raises:
        DataError: the documents hold no token.
    """
    if tokens_per_epoch <= 0:
        raise DataError(
            "the documents of this part hold no token; give it a larger share of the split or other data"
        )
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def num_samples_in(num_tokens: int, *, seq_length: int) -> int:
    """How many samples of `seq_length` + 1 tokens, overlapping by one, a stream of `num_tokens` holds."""
    return (num_tokens - 1) // seq_length


def sample_dtype(num_documents: int) -> np.dtype[np.signedinteger]:
    """The dtype of `SampleIndex.starts` for a stream of `num_documents` documents."""
    return np.dtype(np.int32) if num_documents <= _INT32_MAX else np.dtype(np.int64)


def shuffle_dtype(num_samples: int) -> np.dtype[np.integer]:
    """The dtype of `SampleIndex.shuffle`."""
    return np.dtype(np.uint32) if num_samples < _UINT32_MAX - 1 else np.dtype(np.int64)


def build_sample_index(
    documents: np.ndarray,
    sizes: np.ndarray,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    builder: IndexBuilder | None = None,
) -> SampleIndex:
    """The order of at least `num_samples` samples.

    Args:
        documents: sequence numbers of this part of the data, in file order.
        sizes: tokens of every sequence of the dataset.
        num_samples: samples that will be asked for.
        seq_length: tokens that a sample predicts; it holds one more.
        seed: for both shuffles.
        builder: does the work; None: numpy.

    Raises:
        DataError: the documents hold no token.
    """
    builder = builder or NUMPY
    documents = np.asarray(documents, dtype=np.int32)
    tokens_per_epoch = builder.count_tokens(documents, sizes)
    epochs = num_epochs(tokens_per_epoch, num_samples=num_samples, seq_length=seq_length)
    # One generator for both shuffles, in this order; numpy's legacy one, whose sequence never changes.
    random = builder.shuffler(seed)
    stream = np.tile(documents, epochs)
    random.shuffle(stream)
    count = num_samples_in(epochs * tokens_per_epoch, seq_length=seq_length)
    starts = builder.sample_starts(stream, sizes, count, seq_length)
    shuffle = np.arange(count, dtype=shuffle_dtype(count))
    random.shuffle(shuffle)
    return SampleIndex(stream, starts, shuffle)


def _count_tokens(documents: np.ndarray, sizes: np.ndarray) -> int:
    return int(sizes[documents].sum(dtype=np.int64))


def _sample_starts(stream: np.ndarray, sizes: np.ndarray, count: int, seq_length: int) -> np.ndarray:
    """Document and offset of tokens 0, L, 2L ... of the stream's documents laid end to end."""
    lengths = sizes[stream]
    ends = np.cumsum(lengths, dtype=np.int64)
    positions = np.arange(count + 1, dtype=np.int64) * seq_length
    # The document whose tokens include the position: the first that ends after it. Empty ones never do.
    inside = np.searchsorted(ends, positions, side="right")
    starts = np.empty((count + 1, 2), dtype=sample_dtype(len(lengths)))
    starts[:, 0] = inside
    starts[:, 1] = positions - (ends[inside] - lengths[inside])
    # The stream begins at its first document even where that one is empty.
    starts[0] = 0
    return starts


NUMPY = IndexBuilder(np.random.RandomState, _count_tokens, _sample_starts)
