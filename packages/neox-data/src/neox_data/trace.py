"""Which documents a training reads and when, from the orders alone.

The datasets answer as they do for a training, so a trace equals what was read: whatever the number of ranks,
after resuming, and inside blends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from neox_data.blend import SampleDataset
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed.base import IndexedDataset
from neox_data.lazy_dataset import LazyGPTDataset
from neox_data.sampler import BatchSampler
from neox_data.training_data import BatchPlace, TrainingData

__all__ = [
    "Passage",
    "Reading",
    "indexed_datasets",
    "items_with",
    "leaf_dataset",
    "passages",
    "reading_of",
    "readings_at",
]


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive tokens of one document.

    Attributes:
        indexed: the dataset that holds the document.
        document: its number there (the number of a sequence; see docs/formats.md).
        offset: the first of the tokens.
        length: how many.
    """

    indexed: IndexedDataset
    document: int
    offset: int
    length: int

    @property
    def tokens(self) -> np.ndarray:
        """The tokens."""
        return self.indexed.get(self.document, self.offset, self.length)

    def cut(self, length: int) -> "Passage":
        """At most so many tokens of it."""
        return Passage(self.indexed, self.document, self.offset, min(self.length, length))


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample that a training reads.

    Attributes:
        item: of the training part.
        place: the batch that it is in.
        passages: what it is made of.
    """

    item: int
    place: BatchPlace
    passages: list[Passage]


@runtime_checkable
class _Mixture(Protocol):
    """A dataset whose items are items of other datasets."""

    datasets: Sequence[SampleDataset]

    def locate(self, item: int) -> tuple[int, int]: ...

    def items_of(self, dataset: int, place: int) -> list[int]: ...


def passages(dataset: SampleDataset, item: int) -> Iterator[Passage]:
    """The passages that an item of a dataset, or of a mixture of some, is made of; none is empty."""
    while isinstance(dataset, _Mixture):
        number, item = dataset.locate(item)
        dataset = dataset.datasets[number]
    leaf = leaf_dataset(dataset)
    for sequence, offset, length in leaf.pieces(item):
        if length:
            yield Passage(leaf.indexed, sequence, offset, length)


def indexed_datasets(dataset: SampleDataset) -> list[IndexedDataset]:
    """The token files below a dataset, each once."""
    if not isinstance(dataset, _Mixture):
        return [leaf_dataset(dataset).indexed]
    below = (indexed for inner in dataset.datasets for indexed in indexed_datasets(inner))
    return list({str(indexed.prefix): indexed for indexed in below}.values())


def readings_at(data: TrainingData, iteration: int, rank: int | None = None) -> Iterator[Reading]:
    """The samples of an iteration in the order in which they are read, rank by rank.

    Args:
        data: what the training reads.
        iteration: from 0.
        rank: of a process; None: all.

    Raises:
        DataError: there is no such iteration or rank, or no training data.
    """
    dataset = _train_dataset(data)
    if not 0 <= iteration < data.train_iters:
        raise DataError(f"iteration {iteration:,} is not one of 0 to {data.train_iters - 1:,}")
    if rank is not None and not 0 <= rank < len(data.data_parallel_ranks):
        raise DataError(f"rank {rank} is not one of 0 to {len(data.data_parallel_ranks) - 1}")
    ranks = range(data.data_parallel_size) if rank is None else [data.data_parallel_ranks[rank]]
    for replica in ranks:
        sampler = BatchSampler(
            len(dataset),
            micro_batch=data.micro_batch,
            data_parallel_rank=replica,
            data_parallel_size=data.data_parallel_size,
            accumulation=data.accumulation,
        )
        for micro_step in range(data.accumulation):
            for row, item in enumerate(sampler.items(iteration, micro_step)):
                yield _reading(data, item, BatchPlace(iteration, replica, micro_step, row))


def items_with(data: TrainingData, part: str, indexed: IndexedDataset, document: int) -> list[int]:
    """The items of a part, within what the whole training reads, that hold a token of a document; rising."""
    items = _items_with(data.datasets[part], str(indexed.prefix), document)
    return sorted(item for item in items if item < data.num_samples[part])


def reading_of(data: TrainingData, item: int) -> Reading:
    """One item of the training part, with the batch that reads it."""
    return _reading(data, item, data.place_of(item))


def _reading(data: TrainingData, item: int, place: BatchPlace) -> Reading:
    left, found = data.length_at(place.iteration) + 1, []
    for passage in passages(_train_dataset(data), item):
        if left:
            found.append(passage.cut(left))
            left -= found[-1].length
    return Reading(item, place, found)


def _items_with(dataset: SampleDataset, prefix: str, document: int) -> list[int]:
    if not isinstance(dataset, _Mixture):
        leaf = leaf_dataset(dataset)
        return leaf.items_with(document).tolist() if str(leaf.indexed.prefix) == prefix else []
    return [
        item
        for number, inner in enumerate(dataset.datasets)
        for place in _items_with(inner, prefix, document)
        for item in dataset.items_of(number, place)
    ]


def leaf_dataset(dataset: SampleDataset) -> GPTDataset | LazyGPTDataset:
    """The same dataset, as one that says what its items are made of."""
    if not isinstance(dataset, GPTDataset | LazyGPTDataset):
        raise TypeError(f"{type(dataset).__name__} does not say what its items are made of")
    return dataset


def _train_dataset(data: TrainingData) -> SampleDataset:
    if "train" not in data.datasets:
        raise DataError("this configuration has no training data; set data-path or train-data-paths")
    return data.datasets["train"]
