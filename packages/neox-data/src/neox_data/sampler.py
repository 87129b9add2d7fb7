"""Select the items of a data-parallel rank, by iteration and the number of items read before."""

from collections.abc import Sequence

from neox_data.errors import DataError
from neox_data.pluralize import pluralize

__all__ = ["BatchSampler"]


class BatchSampler:
    """Sequential batches of `micro_batch * data_parallel_size` items; each rank takes a contiguous slice.

    An incomplete last batch is not used; after the last batch, items start over from the first one.

    Args:
        num_samples: number of items of the dataset.
        micro_batch: items per forward pass and rank.
        data_parallel_rank: this rank in the data-parallel group.
        data_parallel_size: number of data-parallel ranks.
        accumulation: micro batches per iteration.
        start: number of items read before, in batches of any size.

    Attributes:
        micro_batch: items per forward pass and rank.
        accumulation: micro batches per iteration.
        num_batches: number of complete batches in the data.

    Raises:
        DataError: the dataset has fewer items than a batch.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        accumulation: int,
        start: int = 0,
    ) -> None:
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self._items_per_batch = micro_batch * data_parallel_size
        self._first = micro_batch * data_parallel_rank
        self.num_batches = num_samples // self._items_per_batch
        if not self.num_batches:
            raise DataError(
                f"the data has {pluralize(num_samples, 'sample')}, but one batch of {data_parallel_size} "
                f"data-parallel ranks with {micro_batch} each requires {self._items_per_batch:,}; use more "
                "data or a smaller batch"
            )
        self._start = start
        # Items that do not fill a batch after `start` are not used.
        end = num_samples - (num_samples - start) % self._items_per_batch
        self._end = end if end >= self._items_per_batch else self.num_batches * self._items_per_batch

    def items(self, iteration: int, micro_step: int) -> Sequence[int]:
        """Return the items of this rank in a micro batch of an iteration; both numbers are 0 at `start`."""
        batch = iteration * self.accumulation + micro_step
        first = (self._start + batch * self._items_per_batch + self._first) % self._end
        if first + self.micro_batch <= self._end:
            return range(first, first + self.micro_batch)
        return [(first + row) % self._end for row in range(self.micro_batch)]
