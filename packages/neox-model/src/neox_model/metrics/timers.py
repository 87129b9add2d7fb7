"""Measure the host time of named activities."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["DOCUMENTED_PHASES", "Phases", "Timers"]

DOCUMENTED_PHASES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
"""Phases whose times DeepSpeed's monitors name."""


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


class Phases:
    """Sums the time of the phases of training steps, each without the phases inside it.

    So the times of all phases and of the rest of an iteration add up to its time.

    Args:
        synchronize: waits for the device before every reading of the clock, so that a phase includes the work
            that it has started; a run with this is slower.
        clock: returns seconds since a fixed time.
    """

    def __init__(
        self,
        synchronize: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of a `with` block to a phase, and pause the phase that contains the block."""
        self._switch()
        self._open.append(phase)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def read(self, total: float) -> dict[str, float]:
        """Return the seconds of each phase since the last reading; reset them.

        `backward` is the sum of `backward_inner` and `backward_allreduce`; `other` is the rest of the total.

        Args:
            total: seconds since the last reading.
        """
        seconds, self._seconds = self._seconds, {}
        inner, reduction = seconds.get("backward_inner", 0.0), seconds.get("backward_allreduce", 0.0)
        rest = total - sum(seconds.values())
        return {
            "backward_inner": inner,
            "backward_allreduce": reduction,
            "backward": inner + reduction,
            **seconds,
            "other": rest,
        }

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost open phase."""
        self._synchronize()
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now
