"""Build fixed-length samples from documents, in exactly the order of GPT-NeoX.

The documents are repeated for as many epochs as the samples require, shuffled together and concatenated.
Sample i consists of tokens i*L to i*L + L of this stream; then the samples are shuffled. There is no Python
loop: samples are located by binary search in the cumulative lengths. `native_index` contains compiled
versions of the slow functions.

Source: the dataset order of GPT-NeoX and Megatron-LM, described in docs/formats.md.
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
    """Order of a dataset's samples.

    Attributes:
        documents: int32 [documents * epochs], sequence numbers in the order of the token stream (`doc_idx`).
        starts: int32 or int64 [N + 1, 2], first token of each sample, and the last token of the last one:
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
    """Implementation of the slow steps; all builders give the same result.

    Attributes:
        shuffler: creates a generator from a seed; equivalent to `numpy.random.RandomState(seed)`.
        count_tokens: counts the tokens of sequences, given their numbers and the sizes of all sequences.
        sample_starts: computes `SampleIndex.starts` from the stream of documents, the sizes of all sequences,
            the number of samples and the sequence length.
    """

    shuffler: Callable[[int], Shuffler]
    count_tokens: Callable[[np.ndarray, np.ndarray], int]
    sample_starts: Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


def num_epochs(tokens_per_epoch: int, *, num_samples: int, seq_length: int) -> int:
    """Return the smallest number of epochs (at least 1) with `num_samples` samples.

    Raises:
        DataError: the documents contain no tokens.
    """
    if tokens_per_epoch <= 0:
        raise DataError(
            "the documents of this part contain no tokens; give it a larger share of the split or other data",
            code="no-tokens",
        )
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def num_samples_in(num_tokens: int, *, seq_length: int) -> int:
    """Return the number of samples of `seq_length` + 1 tokens, overlapping by one, in `num_tokens` tokens."""
    return (num_tokens - 1) // seq_length


def sample_dtype(num_documents: int) -> np.dtype[np.signedinteger]:
    """Return the dtype of `SampleIndex.starts` for a stream of `num_documents` documents."""
    return np.dtype(np.int32) if num_documents <= _INT32_MAX else np.dtype(np.int64)


def shuffle_dtype(num_samples: int) -> np.dtype[np.integer]:
    """Return the dtype of `SampleIndex.shuffle`."""
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
    """Build the order of at least `num_samples` samples.

    Args:
        documents: sequence numbers of this part of the data, in file order.
        sizes: number of tokens of every sequence of the dataset.
        num_samples: number of samples required.
        seq_length: number of predicted tokens per sample; a sample contains one more.
        seed: random seed of both shuffles.
        builder: implementation to use; None: numpy.

    Raises:
        DataError: the documents contain no tokens.
    """
    builder = builder or NUMPY
    documents = np.asarray(documents, dtype=np.int32)
    tokens_per_epoch = builder.count_tokens(documents, sizes)
    epochs = num_epochs(tokens_per_epoch, num_samples=num_samples, seq_length=seq_length)
    # One generator for both shuffles, in this order: numpy's legacy one, whose sequence never changes.
    random = builder.shuffler(seed)
    stream = np.tile(documents, epochs)
    random.shuffle(stream)
    count = num_samples_in(epochs * tokens_per_epoch, seq_length=seq_length)
    starts = builder.sample_starts(stream, sizes, count, seq_length)
    shuffle = np.arange(count, dtype=shuffle_dtype(count))
    random.shuffle(shuffle)
    return SampleIndex(stream, starts, shuffle)


def _sample_starts(stream: np.ndarray, sizes: np.ndarray, count: int, seq_length: int) -> np.ndarray:
    """Return document and offset of tokens 0, L, 2L ... of the concatenated documents."""
    lengths = sizes[stream]
    ends = np.cumsum(lengths, dtype=np.int64)
    positions = np.arange(count + 1, dtype=np.int64) * seq_length
    # The document that contains a position is the first one that ends after it; it is never empty.
    inside = np.searchsorted(ends, positions, side="right")
    starts = np.empty((count + 1, 2), dtype=sample_dtype(len(lengths)))
    starts[:, 0] = inside
    starts[:, 1] = positions - (ends[inside] - lengths[inside])
    # The stream starts at its first document, even if that is empty.
    starts[0] = 0
    return starts


NUMPY = IndexBuilder(
    np.random.RandomState, lambda documents, sizes: int(sizes[documents].sum(dtype=np.int64)), _sample_starts
)
