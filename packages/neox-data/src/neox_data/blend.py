"""Blend several datasets: each item comes from the dataset that is furthest behind its share.

The order takes one to four bytes per item, the number of the dataset. The item of that dataset is the number
of its earlier occurrences, counted from stored counts every few thousand items.

Known limits: without the compiled extension, the order is computed item by item in Python.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from neox_data.errors import DataError
from neox_data.native import load_native
from neox_data.pluralize import pluralize
from neox_data.weights import blend_shares, samples_per_dataset

__all__ = [
    "BlendOrder",
    "BlendedDataset",
    "Mixture",
    "SampleDataset",
    "blend_order",
    "build_blend",
    "plain_blend_order",
]

logger = logging.getLogger(__name__)

# A mark costs 8 bytes a dataset, so with many datasets there are fewer: never more than 8 bytes an item.
_LEAST_BLOCK = 4096
# Up to this number of datasets, scanning all is faster than a tournament (measured: equal at about 500).
_MOST_SCANNED = 400


class SampleDataset(Protocol):
    """The interface of datasets with items of tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> np.ndarray: ...


class Mixture(ABC):
    """A dataset whose items are items of other datasets.

    Attributes:
        datasets: the datasets.
    """

    datasets: Sequence[SampleDataset]
    _length: int

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> np.ndarray:
        """Return the tokens of an item, int64 [seq_length + 1]."""
        dataset, place = self.locate(item)
        return self.datasets[dataset][place]

    def locate(self, item: int) -> tuple[int, int]:
        """Return the dataset of an item, and the item in it.

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < self._length:
            raise IndexError(f"item {item} of a mixture of {self._length:,}")
        return self._locate(item)

    @abstractmethod
    def _locate(self, item: int) -> tuple[int, int]:
        """Return the same for an item that exists."""

    @abstractmethod
    def items_of(self, dataset: int, place: int) -> list[int]:
        """Return the items that are item `place` of a dataset, such as one or none."""


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """The dataset, and the item of it, of each item of a blend.

    Attributes:
        datasets: uint8, uint16 or uint32 [items], the dataset of each item.
        taken_before: int64 [blocks, datasets], items taken from each dataset before each block of items.
        block: items per row of `taken_before`.
    """

    datasets: np.ndarray
    taken_before: np.ndarray
    block: int

    @classmethod
    def empty(cls, num_items: int, num_datasets: int) -> "BlendOrder":
        """Allocate an order, uninitialized."""
        dtype = next(
            kind for kind in (np.uint8, np.uint16, np.uint32) if num_datasets - 1 <= np.iinfo(kind).max
        )
        block = max(_LEAST_BLOCK, num_datasets)
        taken_before = np.zeros((num_items // block + 1, num_datasets), np.int64)
        return cls(np.empty(num_items, dtype), taken_before, block)

    def locate(self, item: int) -> tuple[int, int]:
        """Return the dataset of an item, and the item in it."""
        dataset: int = self.datasets.item(item)
        first = item // self.block * self.block
        since = np.count_nonzero(self.datasets[first:item] == dataset)
        return dataset, self.taken_before.item(item // self.block, dataset) + since

    def item_of(self, dataset: int, place: int) -> int | None:
        """Return the item of the blend that is item `place` of a dataset; None if the order ends before."""
        block = int(np.searchsorted(self.taken_before[:, dataset], place, side="right")) - 1
        first = block * self.block
        items = np.flatnonzero(self.datasets[first : first + self.block] == dataset)
        nth = place - self.taken_before.item(block, dataset)
        return first + items.item(nth) if nth < len(items) else None

    def taken(self, num_items: int) -> np.ndarray:
        """Return the items that the first `num_items` take from each dataset, int64 [datasets]."""
        block = num_items // self.block
        counts = np.bincount(
            self.datasets[block * self.block : num_items], minlength=self.taken_before.shape[1]
        )
        return np.asarray(self.taken_before[block] + counts)


def blend_order(weights: np.ndarray, num_items: int) -> BlendOrder:
    """Compute the dataset of each item of a blend.

    Item k comes from the dataset j whose deficit `weights[j] * max(k, 1) - taken[j]` is largest, the first of
    equals, in IEEE doubles.

    Args:
        weights: float64 [datasets], sum 1.
        num_items: length of the order.
    """
    extension = load_native()
    if extension is None:
        return plain_blend_order(weights, num_items)
    order = BlendOrder.empty(num_items, len(weights))
    shares = np.ascontiguousarray(weights, np.float64)
    extension.blend_order(shares, order.datasets, order.taken_before, order.block, _MOST_SCANNED)
    return order


def plain_blend_order(weights: np.ndarray, num_items: int) -> BlendOrder:
    """Compute the same as `blend_order`, directly from the definition (reference implementation)."""
    order = BlendOrder.empty(num_items, len(weights))
    taken = np.zeros(len(weights), dtype=np.float64)
    for k in range(num_items + 1):
        if k % order.block == 0:
            order.taken_before[k // order.block] = taken
        if k < num_items:
            behind = np.argmax(weights * max(k, 1) - taken)
            order.datasets[k] = behind
            taken[behind] += 1
    return order


class BlendedDataset(Mixture):
    """Items of several datasets, mixed by weight in a fixed order.

    Args:
        datasets: datasets built for `samples_per_dataset(num_samples, weights)` samples each.
        weights: relative weights, one per dataset.
        num_samples: number of items that will be read.

    Raises:
        DataError: a dataset has too few items for `num_samples` items of the blend.
    """

    def __init__(self, datasets: Sequence[SampleDataset], weights: Sequence[float], num_samples: int) -> None:
        self.datasets = list(datasets)
        _, self.weights = blend_shares(weights, len(self.datasets))
        self._length = sum(len(dataset) for dataset in self.datasets)
        self._order = blend_order(self.weights, max(num_samples, self._length))
        taken = self._order.taken(num_samples).tolist()
        for number, (dataset, count) in enumerate(zip(self.datasets, taken, strict=True)):
            if count > len(dataset):
                raise DataError(
                    f"dataset {number} of the blend has {pluralize(len(dataset), 'sample')}, but "
                    f"{num_samples:,} "
                    f"items of the blend require {count:,} of them; build it for more samples"
                )

    def _locate(self, item: int) -> tuple[int, int]:
        return self._order.locate(item)

    def taken(self, num_items: int) -> list[int]:
        """Return the items that the first `num_items` of the blend take from each dataset."""
        return [int(count) for count in self._order.taken(num_items)]

    def items_of(self, dataset: int, place: int) -> list[int]:
        """Return the items of the blend that are item `place` of a dataset: one or none."""
        item = self._order.item_of(dataset, place)
        return [] if item is None or item >= self._length else [item]


def build_blend(
    build: Callable[[int, int], SampleDataset], weights: Sequence[float], num_samples: int
) -> BlendedDataset:
    """Build a blend with datasets of the required length.

    Each dataset is built for its share of the samples as GPT-NeoX counts it. If the order takes more items,
    which rounding can cause for a small share, the dataset is built again for this number.

    Args:
        build: function of (number of the dataset, number of samples) that builds the dataset.
        weights: relative weights, one per dataset.
        num_samples: number of items that will be read.
    """
    built, shares = blend_shares(weights, len(weights))
    taken = blend_order(shares, num_samples).taken(num_samples).tolist()
    datasets = []
    for number, count in enumerate(samples_per_dataset(num_samples, built)):
        dataset = build(number, count)
        if len(dataset) < taken[number]:
            logger.info(
                "dataset %d of the blend is built for %d samples, not %d", number, taken[number], count
            )
            dataset = build(number, taken[number])
        datasets.append(dataset)
    return BlendedDataset(datasets, weights, num_samples)
