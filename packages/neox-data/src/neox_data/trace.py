"""Find the documents that a run reads, and when, from the order of the samples.

The datasets are the same as in training, so a trace is exact for any number of ranks, after resuming, and
inside blends.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from neox_data.blend import Mixture, SampleDataset
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed.base import IndexedDataset
from neox_data.inverse_cloze import InverseClozeDataset
from neox_data.labels import LabelledDataset
from neox_data.lazy_dataset import LazyGPTDataset
from neox_data.pluralize import pluralize
from neox_data.sampler import BatchSampler
from neox_data.training_data import BatchPlace, TrainingData
from neox_data.whole_dataset import WholeDocumentDataset

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
        indexed: the dataset that contains the document.
        document: its number in the dataset (the number of a sequence; see docs/formats.md).
        offset: index of the first token in the document.
        length: number of tokens.
    """

    indexed: IndexedDataset
    document: int
    offset: int
    length: int

    @property
    def tokens(self) -> np.ndarray:
        """Return the tokens."""
        return self.indexed.get(self.document, self.offset, self.length)

    def cut(self, length: int) -> "Passage":
        """Return the first `length` tokens of the passage."""
        return Passage(self.indexed, self.document, self.offset, min(self.length, length))


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample that a run reads.

    Attributes:
        item: the item of the training part.
        place: the batch that contains it.
        passages: the passages of the sample.
    """

    item: int
    place: BatchPlace
    passages: list[Passage]


def passages(dataset: SampleDataset, item: int) -> Iterator[Passage]:
    """Yield the non-empty passages of an item of a dataset or a mixture of datasets."""
    while isinstance(dataset, Mixture):
        number, item = dataset.locate(item)
        dataset = dataset.datasets[number]
    leaf = leaf_dataset(dataset)
    for sequence, offset, length in leaf.pieces(item):
        if length:
            yield Passage(leaf.indexed, sequence, offset, length)


def indexed_datasets(dataset: SampleDataset) -> list[IndexedDataset]:
    """Return the token files of a dataset, each once."""
    if not isinstance(dataset, Mixture):
        return [leaf_dataset(dataset).indexed]
    below = (indexed for inner in dataset.datasets for indexed in indexed_datasets(inner))
    return list({str(indexed.prefix): indexed for indexed in below}.values())


def readings_at(data: TrainingData, iteration: int, rank: int | None = None) -> Iterator[Reading]:
    """Yield the samples of an iteration in the order in which they are read, rank by rank.

    Args:
        data: the data of the run.
        iteration: iteration, from 0.
        rank: rank of a process; None: all ranks.

    Raises:
        DataError: there is no such iteration or rank, or no training data.
    """
    dataset = _train_dataset(data)
    if not 0 <= iteration < data.train_iters:
        raise DataError(f"there is no iteration {iteration:,}; pass one from 0 to {data.train_iters - 1:,}")
    if rank is not None and not 0 <= rank < len(data.data_parallel_ranks):
        raise DataError(f"there is no rank {rank}; pass one from 0 to {len(data.data_parallel_ranks) - 1}")
    if not data.knows_ranks(iteration):
        # A resumed run with another batch size.
        first, size = data.batch_sizes.first_item(iteration), data.batch_sizes.at(iteration)
        if rank is not None:
            raise DataError(
                f"iteration {iteration:,} read {pluralize(size, 'sample')}, which is not this "
                "configuration's batch size, and the checkpoint does not record which rank read which; "
                "remove --rank, or set the batch size and the devices of that iteration"
            )
        for item in range(first, first + size):
            yield reading_of(data, item)
        return
    ranks = range(data.data_parallel_size) if rank is None else [data.data_parallel_ranks[rank]]
    for replica in ranks:
        sampler = BatchSampler(
            len(dataset),
            micro_batch=data.micro_batch,
            data_parallel_rank=replica,
            data_parallel_size=data.data_parallel_size,
            accumulation=data.accumulation,
            start=data.batch_sizes.first_item(iteration),
        )
        for micro_step in range(data.accumulation):
            for row, item in enumerate(sampler.items(0, micro_step)):
                yield _reading(data, item, BatchPlace(iteration, replica, micro_step, row))


def items_with(data: TrainingData, part: str, indexed: IndexedDataset, document: int) -> list[int]:
    """Return the items of a part, of those that the run reads, with tokens of a document; increasing."""
    items = _items_with(data.datasets[part], str(indexed.prefix), document)
    return sorted(item for item in items if item < data.num_samples[part])


def reading_of(data: TrainingData, item: int) -> Reading:
    """Return an item of the training part, with the batch that contains it."""
    return _reading(data, item, data.place_of(item))


def _reading(data: TrainingData, item: int, place: BatchPlace) -> Reading:
    left, found = data.length_at(place.iteration), []
    for passage in passages(_train_dataset(data), item):
        if left:
            found.append(passage.cut(left))
            left -= found[-1].length
    return Reading(item, place, found)


def _items_with(dataset: SampleDataset, prefix: str, document: int) -> list[int]:
    if not isinstance(dataset, Mixture):
        leaf = leaf_dataset(dataset)
        return leaf.items_with(document).tolist() if str(leaf.indexed.prefix) == prefix else []
    return [
        item
        for number, inner in enumerate(dataset.datasets)
        for place in _items_with(inner, prefix, document)
        for item in dataset.items_of(number, place)
    ]


_Leaf = GPTDataset | LazyGPTDataset | LabelledDataset | WholeDocumentDataset | InverseClozeDataset


def leaf_dataset(dataset: SampleDataset) -> _Leaf:
    """Return the dataset, checked to provide the pieces of its items."""
    if not isinstance(dataset, _Leaf):
        raise TypeError(f"{type(dataset).__name__} does not support tracing")
    return dataset


def _train_dataset(data: TrainingData) -> SampleDataset:
    if "train" not in data.datasets:
        raise DataError("this configuration has no training data; set data-path or train-data-paths")
    return data.datasets["train"]
