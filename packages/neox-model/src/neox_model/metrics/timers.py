"""Host seconds spent in named activities."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Timers"]


class Timers:
    """Adds up how long each activity took since the last reading.

    Host time: on a GPU the caller reads a number from the device inside the activity if its work must count.

    Args:
        clock: seconds from any fixed moment.
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
        """Seconds since the last reading: outside of all activities, and in each; start again from 0."""
        now = self._clock()
        activities, self._seconds = self._seconds, {}
        outside = now - self._since - sum(activities.values())
        self._since = now
        return outside, activities
