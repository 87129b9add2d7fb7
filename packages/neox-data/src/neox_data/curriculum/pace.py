"""How the largest difficulty grows with the iterations.

Iterations count from 0 here; the formulas count the first as 1.

Source: DeepSpeed's curriculum learning (arXiv:2108.06084), which this repeats number for number.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

__all__ = ["Pace", "changes", "fixed_discrete", "fixed_linear", "fixed_root"]

# From an iteration, the largest difficulty of its samples; never falls.
Pace = Callable[[int], int]


def fixed_root(*, smallest: int, largest: int, iterations: int, multiple: int, degree: int) -> Pace:
    """From `smallest` to `largest` within `iterations`, with the `degree`-th root of the time.

    Difficulties are multiples of `multiple`, but for `largest` where it is none.
    """
    first = min(-(-smallest // multiple) * multiple, largest)

    def difficulty(iteration: int) -> int:
        progress: float = ((iteration + 1) / iterations) ** (1.0 / degree)
        grown = math.floor(progress * (largest - smallest) + smallest)
        return min(max(grown - grown % multiple, first), largest)

    return difficulty


def fixed_linear(*, smallest: int, largest: int, iterations: int, multiple: int) -> Pace:
    """From `smallest` to `largest` within `iterations`, evenly; see `fixed_root`."""
    return fixed_root(smallest=smallest, largest=largest, iterations=iterations, multiple=multiple, degree=1)


def fixed_discrete(*, difficulties: Sequence[int], last_iterations: Sequence[int]) -> Pace:
    """Given difficulties, each until its last iteration (counted from 1); the last one has no end."""
    return lambda iteration: difficulties[bisect_left(last_iterations, iteration + 1)]


def changes(pace: Pace, iterations: int) -> list[tuple[int, int]]:
    """The iterations below `iterations` from which on a new difficulty holds, and that difficulty."""
    found, first = [], 0
    while first < iterations:
        difficulty = pace(first)
        found.append((first, difficulty))
        first = bisect_left(range(iterations), True, lo=first, key=lambda one: pace(one) != difficulty)
    return found
