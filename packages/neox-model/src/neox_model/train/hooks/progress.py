"""Report this worker's progress to its agent, for the detection of hangs and for the live line."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from neox_launcher.worker.reporting import ALL_DONE, FINISHING, Progress
from neox_model.metrics.throughput import Throughput
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.train.hooks.base import Hook
from neox_model.train.read_back import read_back
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["ProgressHook", "ProgressWriter", "StatusReports", "reported_progress", "while_saving"]

_INTERVAL_SECONDS = 1.0
# Rates over less time vary with every pause of the machine.
_RATE_SECONDS = 5.0


class ProgressHook(Hook):
    """Reports each iteration. Must precede slow hooks, so that they do not count as the step's time.

    Args:
        progress: reports to this worker's agent.
        status: reports what the launcher shows; None: nothing is shown.
    """

    def __init__(self, progress: Progress, status: "StatusReports | None" = None) -> None:
        self._progress = progress
        self._status = status if progress.is_shown else None

    def on_start(self, state: TrainState) -> None:
        """Report where the training starts."""
        if self._status is not None:
            self._status.start(state)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Report one finished iteration."""
        self._progress.report(state.iteration)
        if self._status is not None:
            self._status.step(state, report)

    def on_end(self, state: TrainState) -> None:
        """Report the end: the last evaluation and the last save have no time limit."""
        self._progress.report(ALL_DONE)
        if self._status is not None:
            self._status.end(state)


class StatusReports:
    """Reports the state of the training at most once a second, without waiting for the device.

    Args:
        progress: reports to this worker's agent.
        schedule: provides the learning rate.
        throughput: computes rates from tokens and time.
        clock: returns seconds since a fixed time.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        schedule: LearningRateSchedule,
        throughput: Throughput,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._schedule, self._throughput = progress, schedule, throughput
        self._clock = clock
        self._reading = _LateReading()
        self._reported = 0.0
        self._since: tuple[float, int, float] = (0.0, 0, 0.0)

    def start(self, state: TrainState) -> None:
        """Report the iteration from which the training starts."""
        self._rate = self._schedule.current_rate
        self._progress.describe(
            phase="first iteration", iteration=state.iteration, last_iteration=state.last_iteration
        )

    def step(self, state: TrainState, report: StepReport) -> None:
        """Report a finished iteration, if the last report is a second old or no iteration follows."""
        now = self._clock()
        if self._since[0] == 0.0:
            self._since = (now, state.tokens, self._progress.seconds_in_phases)
        numbers = {
            "loss/train": report.loss,
            "optimizer/loss_scale": report.loss_scale,
            "optimizer/learning_rate": self._rate,
        }
        self._rate = self._schedule.current_rate
        self._reading.start(state.iteration, numbers)
        if now - self._reported < _INTERVAL_SECONDS and not state.finished:
            return
        arrived = self._reading.newest()
        if arrived is None:
            return  # The device is behind; the next iteration asks again.
        self._reported = now
        iteration, read = arrived
        self._progress.describe(
            phase="", iteration=iteration, metrics=read | self._rates(now, state) | _memory()
        )

    def end(self, state: TrainState) -> None:
        """Report the last iteration."""
        arrived = self._reading.newest(waits=True)
        read = {} if arrived is None else arrived[1]
        self._progress.describe(phase=FINISHING, iteration=state.iteration, metrics=read)

    def _rates(self, now: float, state: TrainState) -> dict[str, float]:
        since, tokens, in_phases = self._since
        seconds = now - since - (self._progress.seconds_in_phases - in_phases)
        if seconds < _RATE_SECONDS or state.tokens == tokens:
            return {}
        self._since = (now, state.tokens, self._progress.seconds_in_phases)
        return self._throughput.rates(state.tokens - tokens, seconds)


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


class _LateReading:
    """Numbers of the device, copied to the host in the background and read when they have arrived."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def start(self, iteration: int, numbers: Mapping[str, Tensor | float | None]) -> None:
        """Start copying the numbers of an iteration.

        Those of the last iteration are always copied; of earlier ones, the newest that has arrived and one
        that arrives next are kept.
        """
        self._drop_older()
        del self._copies[2:]
        self._copies.append(_Copy(iteration, *_start_copy(numbers)))

    def newest(self, *, waits: bool = False) -> tuple[int, dict[str, float]] | None:
        """Return the newest iteration whose numbers have arrived, with these; None if there are none.

        Args:
            waits: wait for those of the last iteration.
        """
        if waits and self._copies:
            del self._copies[:-1]
            if (arrival := self._copies[0].arrival) is not None:
                arrival.synchronize()
        self._drop_older()
        if not self._copies or not self._copies[0].has_arrived:
            return None
        iteration, numbers, _ = self._copies.pop(0)
        values = read_back(list(numbers.values()))
        return iteration, {
            name: value for name, value in zip(numbers, values, strict=True) if value is not None
        }

    def _drop_older(self) -> None:
        """Keep of the copies that have arrived only the newest."""
        while len(self._copies) > 1 and self._copies[1].has_arrived:
            del self._copies[0]


def _start_copy(
    numbers: Mapping[str, Tensor | float | None],
) -> tuple[Mapping[str, Tensor | float | None], torch.cuda.Event | None]:
    """Start copying numbers to host memory; return the copies and the event after which they are complete."""
    copies = {name: _copied(value) for name, value in numbers.items()}
    if not any(isinstance(value, Tensor) and value.is_cuda for value in numbers.values()):
        return copies, None
    arrival = torch.cuda.Event()
    arrival.record()
    return copies, arrival


def _copied(value: Tensor | float | None) -> Tensor | float | None:
    """Return a copy in host memory, which on a GPU is complete only later."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_cuda:
        return value.detach().clone()
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value.detach(), non_blocking=True)


class ProgressWriter:
    """A metric writer that reports the validation loss.

    Args:
        progress: reports to this worker's agent.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Report the validation loss, if it is among the metrics."""
        if "loss/validation" in metrics:
            self._progress.describe(metrics={"loss/validation": metrics["loss/validation"]})

    def flush(self) -> None:
        """Do nothing; reports are written immediately."""

    def close(self) -> None:
        """Do nothing; the agent reads the last report."""


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


def _memory() -> dict[str, float]:
    if not torch.cuda.is_initialized():
        return {}
    return {"memory/bytes": float(torch.cuda.max_memory_allocated())}
