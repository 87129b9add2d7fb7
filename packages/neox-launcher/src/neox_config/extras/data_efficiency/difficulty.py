"""Schedules of the maximum difficulty by iteration: how the curricula grow.

Iterations count from 0 here; the formulas count the first as 1.

Source: DeepSpeed's curriculum learning (arXiv:2108.06084), which this repeats number for number.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

__all__ = ["DifficultySchedule", "fixed_discrete", "fixed_root"]

# From an iteration, the largest difficulty of its samples; never falls.
DifficultySchedule = Callable[[int], int]


def fixed_root(
    *, smallest: int, largest: int, iterations: int, multiple: int, degree: int
) -> DifficultySchedule:
    """Increase from `smallest` to `largest` in `iterations`, with the `degree`-th root of the time.

    Difficulties are multiples of `multiple`, except `largest`, if it is not a multiple.
    """
    first = min(smallest + -smallest % multiple, largest)

    def difficulty(iteration: int) -> int:
        progress: float = ((iteration + 1) / iterations) ** (1.0 / degree)
        grown = math.floor(progress * (largest - smallest) + smallest)
        return min(max(grown - grown % multiple, first), largest)

    return difficulty


def fixed_discrete(*, difficulties: Sequence[int], last_iterations: Sequence[int]) -> DifficultySchedule:
    """Return a schedule of given difficulties, each until its last iteration (from 1), the last forever."""
    return lambda iteration: difficulties[bisect_left(last_iterations, iteration + 1)]
