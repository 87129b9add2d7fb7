"""Which items a data-parallel rank reads: computed from how many were read before and the iteration since."""

from collections.abc import Sequence

from neox_data.errors import DataError

__all__ = ["BatchSampler"]


class BatchSampler:
    """Items in order, in batches of `micro_batch * data_parallel_size`; each rank takes its contiguous slice.

    A last incomplete batch is never used; after the last batch the items follow from the first one again.

    Args:
        num_samples: items of the dataset.
        micro_batch: items of one forward pass on one rank.
        data_parallel_rank: this rank's place among the replicas.
        data_parallel_size: replicas.
        accumulation: micro batches of one iteration.
        start: items that were read before, in batches of whatever size.

    Attributes:
        micro_batch: items of one forward pass on one rank.
        accumulation: micro batches of one iteration.
        num_batches: complete batches in the data.

    Raises:
        DataError: the dataset does not fill one batch.
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
                f"the data holds {num_samples:,} samples, and one batch of {data_parallel_size} "
                "data-parallel ranks "
                f"with {micro_batch} each needs {self._items_per_batch:,}; use more data or a smaller batch"
            )
        self._start = start
        # Only what does not fill a batch after `start` is left out.
        end = num_samples - (num_samples - start) % self._items_per_batch
        self._end = end if end >= self._items_per_batch else self.num_batches * self._items_per_batch

    def items(self, iteration: int, micro_step: int) -> Sequence[int]:
        """The items of this rank in micro batch `micro_step` of an iteration, both from 0 at `start`."""
        batch = iteration * self.accumulation + micro_step
        first = (self._start + batch * self._items_per_batch + self._first) % self._end
        if first + self.micro_batch <= self._end:
            return range(first, first + self.micro_batch)
        return [(first + row) % self._end for row in range(self.micro_batch)]
