"""Load micro-batches as torch tensors, prefetched by threads.

Threads suffice: a sample takes microseconds, copying it releases the GIL, and forking after torch has started
threads is unsafe. This is the only file of the package that imports torch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from neox_data.blend import SampleDataset
from neox_data.errors import DataError
from neox_data.sampler import BatchSampler

__all__ = ["PrefetchLoader"]

Item = TypeVar("Item")

_AHEAD_PER_THREAD = 2


class PrefetchLoader(Iterator[Item], Generic[Item]):
    """Endless iterator over this rank's micro-batches, `sampler.accumulation` of them per iteration.

    The order is the sampler's for any number of threads. An error in loading a micro-batch is raised when
    that micro-batch is requested, and closes the loader.

    Args:
        dataset: dataset whose items have equal numbers of tokens.
        sampler: selects and orders the items.
        num_threads: number of prefetch threads; 0: load each micro-batch when it is requested.
        length_at: function of the iteration, counted from the start of the sampler, that returns the number
            of tokens that its samples predict; None: all.
        prepare: function of the tokens of a micro-batch, called in the prefetch threads, whose result is
            returned instead; None: return the tokens.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        sampler: BatchSampler,
        *,
        num_threads: int = 1,
        length_at: Callable[[int], int] | None = None,
        prepare: Callable[[Tensor], Item] | None = None,
    ) -> None:
        self._dataset = dataset
        self._prepare = prepare
        self._steps = (
            (sampler.items(iteration, micro_step), None if length_at is None else length_at(iteration) + 1)
            for iteration in count()
            for micro_step in range(sampler.accumulation)
        )
        self._closed = False
        self._executor = ThreadPoolExecutor(num_threads, "prefetch") if num_threads else None
        self._pending: deque[Future[Item]] = deque()
        for _ in range(num_threads * _AHEAD_PER_THREAD):
            self._submit()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """Return the next micro-batch, by default int64 [micro_batch, tokens predicted + 1].

        It is [micro_batch, 2, tokens predicted + 1] if the items have labels after their tokens.

        Raises:
            DataError: the loader is closed.
        """
        if self._closed:
            raise DataError(
                "this loader is closed; create a new one that starts at the next sample", code="closed"
            )
        try:
            return self._take() if self._executor else self._assemble(*next(self._steps))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the threads and drop prefetched micro-batches."""
        self._closed = True
        self._pending.clear()
        if self._executor:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> Item:
        future = self._pending.popleft()
        self._submit()
        return future.result()

    def _submit(self) -> None:
        assert self._executor is not None
        self._pending.append(self._executor.submit(self._assemble, *next(self._steps)))

    def _assemble(self, items: Sequence[int], length: int | None) -> Any:
        tokens = torch.from_numpy(np.stack([self._dataset[item][..., :length] for item in items]))
        return tokens if self._prepare is None else self._prepare(tokens)
