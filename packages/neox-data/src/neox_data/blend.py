"""Several datasets as one: each next item comes from the dataset that is furthest behind its share.

The order takes one to four bytes an item: which dataset. Which item of it follows from how often that dataset
came before, and that is counted from the last of the marks that are kept every few thousand items.

Known limits: where the extension was not built, the order is found item by item in Python.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from neox_data.errors import DataError
from neox_data.native import load_native
from neox_data.weights import normalise_weights, samples_per_dataset

__all__ = ["BlendOrder", "BlendedDataset", "SampleDataset", "blend_order", "build_blend", "plain_blend_order"]

logger = logging.getLogger(__name__)

# A mark costs 8 bytes a dataset, so with many datasets there are fewer: never more than 8 bytes an item.
_LEAST_BLOCK = 4096
# Up to so many datasets, looking at all of them is faster than a tournament (measured: equal at about 500).
_MOST_SCANNED = 400


class SampleDataset(Protocol):
    """Anything with items of tokens by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """Which dataset, and which item of it, each item of a blend is.

    Attributes:
        datasets: uint8, uint16 or uint32 [items], the dataset of each item.
        taken_before: int64 [blocks, datasets], items taken of each dataset before each block of items.
        block: items from one row of `taken_before` to the next.
    """

    datasets: np.ndarray
    taken_before: np.ndarray
    block: int

    @classmethod
    def empty(cls, num_items: int, num_datasets: int) -> "BlendOrder":
        """Room for an order, yet to be filled."""
        dtype = next(
            kind for kind in (np.uint8, np.uint16, np.uint32) if num_datasets - 1 <= np.iinfo(kind).max
        )
        block = max(_LEAST_BLOCK, num_datasets)
        taken_before = np.zeros((num_items // block + 1, num_datasets), np.int64)
        return cls(np.empty(num_items, dtype), taken_before, block)

    def locate(self, item: int) -> tuple[int, int]:
        """The dataset of an item, and the item there."""
        dataset: int = self.datasets.item(item)
        first = item // self.block * self.block
        since = np.count_nonzero(self.datasets[first:item] == dataset)
        return dataset, self.taken_before.item(item // self.block, dataset) + since

    def item_of(self, dataset: int, place: int) -> int | None:
        """The item of the blend that is item `place` of a dataset; None where the order ends before it."""
        block = int(np.searchsorted(self.taken_before[:, dataset], place, side="right")) - 1
        first = block * self.block
        items = np.flatnonzero(self.datasets[first : first + self.block] == dataset)
        nth = place - self.taken_before.item(block, dataset)
        return first + items.item(nth) if nth < len(items) else None

    def taken(self, num_items: int) -> np.ndarray:
        """Items that the first `num_items` take of each dataset, int64 [datasets]."""
        block = num_items // self.block
        counts = np.bincount(
            self.datasets[block * self.block : num_items], minlength=self.taken_before.shape[1]
        )
        return np.asarray(self.taken_before[block] + counts)


def blend_order(weights: np.ndarray, num_items: int) -> BlendOrder:
    """For each item of a blend, the dataset it comes from.

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
    """What `blend_order` gives, read word for word from its definition."""
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


class BlendedDataset:
    """Items of several datasets, mixed by weight in a fixed order.

    Args:
        datasets: built for `samples_per_dataset(num_samples, weights)` samples each.
        weights: relative shares, one per dataset.
        num_samples: items that will be asked for.

    Raises:
        DataError: within `num_samples` items a dataset would be asked past its end.
    """

    def __init__(self, datasets: Sequence[SampleDataset], weights: Sequence[float], num_samples: int) -> None:
        self.datasets = list(datasets)
        self.weights = normalise_weights(weights, len(self.datasets))
        self._length = sum(len(dataset) for dataset in self.datasets)
        self._order = blend_order(self.weights, max(num_samples, self._length))
        taken = self._order.taken(num_samples).tolist()
        for number, (dataset, count) in enumerate(zip(self.datasets, taken, strict=True)):
            if count > len(dataset):
                raise DataError(
                    f"dataset {number} of the blend holds {len(dataset):,} samples, and {num_samples:,} "
                    f"items of the blend need {count:,} of them; build it for more samples"
                )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> np.ndarray:
        """The tokens of an item, int64 [seq_length + 1]."""
        dataset, place = self.locate(item)
        return self.datasets[dataset][place]

    def locate(self, item: int) -> tuple[int, int]:
        """The dataset that an item comes from, and the item there.

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < self._length:
            raise IndexError(f"item {item} of a blend of {self._length:,}")
        return self._order.locate(item)

    def taken(self, num_items: int) -> list[int]:
        """Items that the first `num_items` of the blend take of each dataset."""
        return [int(count) for count in self._order.taken(num_items)]

    def items_of(self, dataset: int, place: int) -> list[int]:
        """The items of the blend that are item `place` of a dataset: one or none."""
        item = self._order.item_of(dataset, place)
        return [] if item is None or item >= self._length else [item]


def build_blend(
    build: Callable[[int, int], SampleDataset], weights: Sequence[float], num_samples: int
) -> BlendedDataset:
    """A blend of datasets that are made as long as it needs them.

    Each is built for its share of the samples as GPT-NeoX counts it. Where the order takes more than that
    gives, as rounding can do with a small share, it is built once more for what the order takes.

    Args:
        build: from the number of a dataset and a number of samples, the dataset.
        weights: relative shares, one per dataset.
        num_samples: items that will be asked for.
    """
    shares = normalise_weights(weights, len(weights))
    taken = blend_order(shares, num_samples).taken(num_samples).tolist()
    datasets = []
    for number, count in enumerate(samples_per_dataset(num_samples, shares)):
        dataset = build(number, count)
        if len(dataset) < taken[number]:
            logger.info(
                "dataset %d of the blend is built for %d samples, not %d", number, taken[number], count
            )
            dataset = build(number, taken[number])
        datasets.append(dataset)
    return BlendedDataset(datasets, weights, num_samples)
