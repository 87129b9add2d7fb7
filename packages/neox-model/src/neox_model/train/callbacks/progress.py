"""Report this worker's progress to its agent, for the detection of hangs and for the live line."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor

from neox_launcher.worker.reporting import ALL_DONE, FINISHING, Progress
from neox_model.metrics.bus import read_back
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["ProgressCallback", "reported_progress", "while_saving"]


class _Copy(NamedTuple):
    """The numbers of an iteration on their way to the host.

    Args:
        iteration: the iteration that they belong to.
        numbers: copies in host memory.
        arrival: recorded after the copies; None if they are complete.
    """

    iteration: int
    numbers: Mapping[str, Tensor | float | None]
    arrival: torch.cuda.Event | None

    @property
    def has_arrived(self) -> bool:
        return self.arrival is None or self.arrival.query()

    def read(self) -> dict[str, float]:
        """Return the known numbers."""
        values = zip(self.numbers, read_back(list(self.numbers.values())), strict=True)
        return {name: value for name, value in values if value is not None}


class ProgressCallback(Callback):
    """Reports each iteration. Must precede slow callbacks, so that they do not count as the step's time.

    If the launcher shows it, reports also the state of the run, at most once a second, without waiting for
    the device.

    Args:
        clock: returns seconds since a fixed time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Of the last iteration always; of earlier ones the newest that has arrived and one that arrives next.
        self._copies: list[_Copy] = []
        self._rate: Tensor | float = 0.0
        self._reported = 0.0
        self._since: tuple[float, int, float] = (0.0, 0, 0.0)

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Build it."""
        return cls()

    def on_start(self) -> None:
        """Report where the run starts."""
        self._rate = self.run.schedule.current_rate
        self.run.progress.describe(
            phase="first iteration",
            iteration=self.run.state.iteration,
            last_iteration=self.run.state.last_iteration,
        )

    def on_step(self, report: StepReport) -> None:
        """Report one finished iteration."""
        self.run.progress.report(self.run.state.iteration)
        if self.run.progress.is_shown:
            self._describe(report)

    def on_end(self) -> None:
        """Report the end: the last evaluation and the last save have no time limit."""
        self.run.progress.report(ALL_DONE)
        read: dict[str, float] = {}
        if self._copies:
            last = self._copies[-1]
            if last.arrival is not None:
                last.arrival.synchronize()
            read = last.read()
        self.run.progress.describe(phase=FINISHING, iteration=self.run.state.iteration, metrics=read)

    def _describe(self, report: StepReport) -> None:
        """Report a finished iteration, if the last report is a second old or no iteration follows."""
        now, state = self._clock(), self.run.state
        if self._since[0] == 0.0:
            self._since = (now, state.tokens, self.run.progress.seconds_in_phases)
        numbers = {
            "loss/train": report.loss,
            "optimizer/loss_scale": report.loss_scale,
            "optimizer/learning_rate": self._rate,
        }
        self._rate = self.run.schedule.current_rate
        self._drop_older()
        self._copies = [*self._copies[:2], _Copy(state.iteration, *_start_copy(numbers))]
        if now - self._reported < 1.0 and not state.finished:
            return
        self._drop_older()
        if not self._copies[0].has_arrived:
            return  # The device is behind; the next iteration asks again.
        self._reported = now
        newest = self._copies.pop(0)
        metrics = newest.read() | self._rates(now)
        if torch.cuda.is_initialized():
            metrics["memory/bytes"] = float(torch.cuda.max_memory_allocated())
        self.run.progress.describe(phase="", iteration=newest.iteration, metrics=metrics)

    def _drop_older(self) -> None:
        """Keep of the copies that have arrived only the newest."""
        while len(self._copies) > 1 and self._copies[1].has_arrived:
            del self._copies[0]

    def _rates(self, now: float) -> dict[str, float]:
        since, tokens, in_phases = self._since
        seconds = now - since - (self.run.progress.seconds_in_phases - in_phases)
        # Rates over less time vary with every pause of the machine.
        if seconds < 5.0 or self.run.state.tokens == tokens:
            return {}
        self._since = (now, self.run.state.tokens, self.run.progress.seconds_in_phases)
        return self.run.throughput.rates(self.run.state.tokens - tokens, seconds)


def _start_copy(
    numbers: Mapping[str, Tensor | float | None],
) -> tuple[Mapping[str, Tensor | float | None], torch.cuda.Event | None]:
    """Start copying numbers to host memory; return the copies and the event after which they are complete."""
    copies, arrival = dict(numbers), None
    for name, value in numbers.items():
        if isinstance(value, Tensor) and value.is_cuda:
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            copies[name] = host.copy_(value.detach(), non_blocking=True)
            arrival = torch.cuda.Event()
        elif isinstance(value, Tensor):
            copies[name] = value.detach().clone()
    if arrival is not None:
        arrival.record()
    return copies, arrival


@contextmanager
def reported_progress(rank: int) -> Iterator[Progress]:
    """Return the reports of this worker; warnings that are logged within the context are counted in them."""
    progress = Progress(rank)
    counter = _WarningCounter(progress)
    root = logging.getLogger()
    if progress.is_shown:
        root.addHandler(counter)
    try:
        yield progress
    finally:
        root.removeHandler(counter)


@contextmanager
def while_saving(progress: Progress, iteration: int) -> Iterator[None]:
    """Report that a checkpoint is being saved, and progress, however long it takes."""
    with progress.phase(f"saving iteration {iteration:,}", iteration=iteration), progress.repeated(iteration):
        yield


class _WarningCounter(logging.Handler):
    """Reports the number of warnings and errors that this worker has logged."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress, self._count = progress, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self._count += 1
        self._progress.describe(warnings=self._count)
