"""The changes of a maximum difficulty that grows with the iterations, counted from 0."""

from bisect import bisect_left
from collections.abc import Callable

__all__ = ["DifficultySchedule", "changes"]

# From an iteration, the largest difficulty of its samples; never falls.
DifficultySchedule = Callable[[int], int]


def changes(schedule: DifficultySchedule, iterations: int) -> list[tuple[int, int]]:
    """Return (iteration, difficulty) for each change of the difficulty before `iterations`."""
    found, first = [], 0
    while first < iterations:
        difficulty = schedule(first)
        found.append((first, difficulty))
        first = bisect_left(range(iterations), True, lo=first, key=lambda one: schedule(one) != difficulty)
    return found
