"""The speed by which the terminal and the log of a run say when it ends."""

import math
from collections.abc import Callable

__all__ = ["Eta"]

# Until old iterations count for less than a third.
_MEMORY_SECONDS = 1800.0


class Eta:
    """The time per iteration, evaluations and saves included; the last half hour counts most.

    Args:
        clock: returns seconds since a fixed time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[int, float] | None = None
        self._seconds = self._iterations = 0.0

    def note(self, iteration: int) -> float | None:
        """Record a completed iteration, and return the seconds per iteration; None if not known yet.

        The first iteration recorded only starts the clock, because it may include compilation.
        """
        now = self._clock()
        if self._last is None or iteration < self._last[0]:
            self._last, self._seconds, self._iterations = (iteration, now), 0.0, 0.0
        elif iteration > self._last[0]:
            seconds = now - self._last[1]
            kept = math.exp(-seconds / _MEMORY_SECONDS)
            self._seconds = kept * self._seconds + seconds
            self._iterations = kept * self._iterations + iteration - self._last[0]
            self._last = (iteration, now)
        return self._seconds / self._iterations if self._iterations else None

    def leave_out(self) -> None:
        """Leave the time since the last recorded iteration out, such as a pause of the run."""
        if self._last is not None:
            self._last = (self._last[0], self._clock())
