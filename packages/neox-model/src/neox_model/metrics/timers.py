"""Measure the host time of named activities."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Timers"]


class Timers:
    """Sums the time of each activity since the last reading.

    This is host time: to include work on a GPU, synchronize inside the activity.

    Args:
        clock: returns seconds since a fixed time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._since = clock()

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Add the time of a `with` block to an activity; blocks must not nest."""
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[activity] = self._seconds.get(activity, 0.0) + self._clock() - started

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the seconds outside all activities and in each, since the last reading; reset both."""
        now = self._clock()
        activities, self._seconds = self._seconds, {}
        outside = now - self._since - sum(activities.values())
        self._since = now
        return outside, activities
