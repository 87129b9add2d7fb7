"""Measure how long this rank itself computes in an iteration, without waiting for the device."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["HOST_CLOCK", "Clock", "ComputeTime", "device_clock"]


@dataclass(frozen=True, slots=True)
class Clock:
    """A source of moments on a host or on a device.

    Args:
        now: returns the current moment.
        is_past: returns True if a moment has passed; on a device, moments are points in its queue of work.
        seconds: returns the seconds from one past moment to another.
    """

    now: Callable[[], Any]
    is_past: Callable[[Any], bool]
    seconds: Callable[[Any, Any], float]


HOST_CLOCK = Clock(
    now=time.perf_counter, is_past=lambda moment: True, seconds=lambda begin, end: float(end - begin)
)


def device_clock() -> Clock:
    """Return the clock of the current CUDA device and stream."""

    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return Clock(
        now=now,
        is_past=lambda event: bool(event.query()),
        seconds=lambda begin, end: float(begin.elapsed_time(end)) / 1000,
    )


class ComputeTime:
    """Sums the time of some phases of each iteration, without the phases inside them.

    An iteration counts once the device has finished it, so an iteration that the device still computes is
    part of the next reading.

    Args:
        phases: the phases to sum (see `Engine.measure_phases`).
        clock: measures them.
    """

    def __init__(self, phases: Collection[str], clock: Clock) -> None:
        self._phases = frozenset(phases)
        self._clock = clock
        self._open: list[str] = []
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._unfinished: deque[list[tuple[Any, Any]]] = deque()
        self._seconds: list[float] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure a `with` block as a phase, and pause the phase that contains the block."""
        self._end_span()
        self._open.append(phase)
        self._begin_span()
        try:
            yield
        finally:
            self._end_span()
            self._open.pop()
            self._begin_span()

    def end_iteration(self) -> None:
        """Begin another iteration; one that computed nothing does not count."""
        if self._spans:
            self._unfinished.append(self._spans)
        self._spans = []
        while self._unfinished and self._clock.is_past(self._unfinished[0][-1][1]):
            spans = self._unfinished.popleft()
            self._seconds.append(sum(self._clock.seconds(begin, end) for begin, end in spans))

    def discard_iteration(self) -> None:
        """Begin another iteration, and leave out the last one."""
        self._spans = []

    def read(self) -> float | None:
        """Return the mean seconds of the finished iterations since the last reading; None without any."""
        seconds, self._seconds = self._seconds, []
        return sum(seconds) / len(seconds) if seconds else None

    @property
    def _is_counting(self) -> bool:
        return bool(self._open) and self._open[-1] in self._phases

    def _begin_span(self) -> None:
        if self._is_counting:
            self._begin = self._clock.now()

    def _end_span(self) -> None:
        if self._is_counting:
            self._spans.append((self._begin, self._clock.now()))
