"""Which items a data-parallel rank reads, worked out from the iteration alone, so resuming needs no state."""

from neox_data.errors import DataError

__all__ = ["BatchSampler"]


class BatchSampler:
    """Items in order, in batches of `micro_batch * data_parallel_size`; each rank takes its contiguous slice.

    A last incomplete batch is never used; past the last batch the first follows again.

    Args:
        num_samples: items of the dataset.
        micro_batch: items of one forward pass on one rank.
        data_parallel_rank: this rank's place among the replicas.
        data_parallel_size: replicas.
        accumulation: micro batches of one iteration.

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

    def items(self, iteration: int, micro_step: int) -> range:
        """The items of this rank in micro batch `micro_step` of an iteration, both from 0."""
        batch = (iteration * self.accumulation + micro_step) % self.num_batches
        first = batch * self._items_per_batch + self._first
        return range(first, first + self.micro_batch)
