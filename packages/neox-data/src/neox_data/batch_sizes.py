"""Batch sizes of the iterations of a run, which a resume may change."""

from bisect import bisect_right
from dataclasses import dataclass

__all__ = ["BatchSizes"]


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The batch size of every iteration.

    Args:
        changes: (iteration, samples) pairs with increasing iterations, the first 0: samples per iteration,
            starting at that iteration.
    """

    changes: tuple[tuple[int, int], ...] = ()

    def then(self, iteration: int, samples: int) -> "BatchSizes":
        """Return the same batch sizes before an iteration, and `samples` from it on."""
        kept = tuple(change for change in self.changes if change[0] < iteration)
        is_same = bool(kept) and kept[-1][1] == samples
        return BatchSizes(kept if is_same else (*kept, (iteration, samples)))

    def at(self, iteration: int) -> int:
        """Return the number of samples that an iteration reads."""
        place = bisect_right(self.changes, iteration, key=lambda change: change[0]) - 1
        return self.changes[place][1]

    def first_item(self, iteration: int) -> int:
        """Return the number of samples read before an iteration."""
        ends = [*(first for first, _ in self.changes[1:]), iteration]
        stretches = zip(self.changes, ends, strict=False)
        return sum(max(0, min(end, iteration) - first) * samples for (first, samples), end in stretches)

    def iteration_of(self, item: int) -> int:
        """Return the iteration that reads a sample."""
        firsts = [self.first_item(first) for first, _ in self.changes]
        place = bisect_right(firsts, item) - 1
        first, samples = self.changes[place]
        return first + (item - firsts[place]) // samples
