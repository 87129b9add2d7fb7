"""Measure the host time of named activities."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["DOCUMENTED_PHASES", "Timers", "phase_times"]

DOCUMENTED_PHASES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
"""Phases whose times DeepSpeed's monitors name."""


class Timers:
    """Sums the host time of each activity since the last reading, without the activities inside it.

    So the times of all activities and the time outside of them add up to the whole.

    Args:
        synchronize: waits for the device before every reading of the clock, so that an activity includes the
            work that it has started; a run with this is slower.
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
        self._switched = self._read = clock()

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Add the time of a `with` block to an activity, and pause the one that contains the block."""
        self._switch()
        self._open.append(activity)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the seconds outside all activities and in each, since the last reading; reset both."""
        before, self._read = self._read, self._clock()
        seconds, self._seconds = self._seconds, {}
        return self._read - before - sum(seconds.values()), seconds

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost open activity."""
        self._synchronize()
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._switched
        self._switched = now


def phase_times(seconds: Mapping[str, float], total: float) -> dict[str, float]:
    """Return the seconds of each phase of training steps, with what follows from them.

    `backward` is the sum of `backward_inner` and `backward_allreduce`; `other` is the rest of the total.
    """
    inner, reduction = seconds.get("backward_inner", 0.0), seconds.get("backward_allreduce", 0.0)
    return {
        "backward_inner": inner,
        "backward_allreduce": reduction,
        "backward": inner + reduction,
        **seconds,
        "other": total - sum(seconds.values()),
    }
