"""Blend several datasets in a computed order, without files or a pass over the items.

Each dataset owns an interval of [0, 1) of the length of its share. Item k belongs to the owner of the point
obtained by mirroring the binary digits of k at the binary point (1, 2, 3 are 0.1, 0.01, 0.11). These points
are evenly distributed, so every range of the blend has the requested shares up to a few items. The number of
the first k points in an interval is computed digit by digit; it is the index of the item in its dataset.

Source: J. G. van der Corput, Verteilungsfunktionen (1935), for the points. Not GPT-NeoX's order: see `blend`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from neox_data.blend import Mixture, SampleDataset
from neox_data.weights import normalise_weights

__all__ = ["LazyBlendedDataset", "SpreadPoints"]

# Points are integers below 2**_DIGITS, more than the items of any corpus.
_DIGITS = 62


class SpreadPoints:
    """Computes the interval of item k, and the number of earlier items in it.

    Args:
        shares: lengths of the intervals, at least 0, one of them above 0; any scale.
    """

    def __init__(self, shares: Sequence[int] | Sequence[float]) -> None:
        ends = list(accumulate(shares, initial=0))
        self._bounds = [int(end / ends[-1] * (1 << _DIGITS)) for end in ends]

    def owner(self, item: int) -> int:
        """Return the interval of an item."""
        point = int(f"{item:0{_DIGITS}b}"[::-1], 2)
        return bisect_right(self._bounds, point) - 1

    def taken(self, items: int, owner: int) -> int:
        """Return the number of the first `items` in an interval."""
        low, high = self._bounds[owner : owner + 2]
        count = offset = 0
        for digit in range(items.bit_length() - 1, -1, -1):
            if items >> digit & 1:
                # The next 2**digit items are points that far apart, the first at `offset`.
                distance = 1 << (_DIGITS - digit)
                count += -((offset - high) // distance) + (offset - low) // distance
                offset |= distance >> 1
        return count

    def item_of(self, owner: int, place: int) -> int:
        """Return item number `place` (from 0) of an interval, which must not be empty."""
        high = 1
        while self.taken(high, owner) <= place:
            high *= 2
        return bisect_left(range(high + 1), place + 1, key=lambda items: self.taken(items, owner)) - 1


class LazyBlendedDataset(Mixture):
    """Items of several datasets, mixed by weight in a computed order.

    The dataset of item k, and the item in it, depend only on the weights.

    Args:
        build: function of (number of the dataset, number of samples) that builds the dataset.
        weights: relative weights, one per dataset.
        num_samples: number of items that will be read.
    """

    def __init__(
        self, build: Callable[[int, int], SampleDataset], weights: Sequence[float], num_samples: int
    ) -> None:
        self.weights = normalise_weights(weights, len(weights))
        self._points = SpreadPoints(self.weights.tolist())
        self._length = num_samples
        self.datasets = [
            build(number, self._points.taken(num_samples, number)) for number in range(len(weights))
        ]

    def _locate(self, item: int) -> tuple[int, int]:
        owner = self._points.owner(item)
        return owner, self._points.taken(item, owner)

    def taken(self, num_items: int) -> list[int]:
        """Return the items that the first `num_items` of the blend take from each dataset."""
        return [self._points.taken(num_items, number) for number in range(len(self.datasets))]

    def items_of(self, dataset: int, place: int) -> list[int]:
        """Return the items of the blend that are item `place` of a dataset: one or none."""
        if place >= self._points.taken(self._length, dataset):
            return []
        return [self._points.item_of(dataset, place)]
