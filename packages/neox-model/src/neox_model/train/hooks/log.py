"""Write the loss, learning rate, gradient norm and throughput at a fixed interval."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from neox_launcher.protocol.pace import Pace
from neox_model.metrics.throughput import Throughput
from neox_model.metrics.timers import Phases, Timers
from neox_model.metrics.writers.base import MetricWriter
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.train.hooks.base import Hook
from neox_model.train.state import StepReport, TrainState, read_back

__all__ = ["LogHook"]

logger = logging.getLogger(__name__)

# Written only after an update has been skipped, or if the loss is a spike.
_SKIPPED, _SPIKE = "optimizer/skipped_iterations", "loss/spike"
# Infinite while too few losses are known.
_LIMIT = "loss/spike_limit"


class LogHook(Hook):
    """Collects the report of each iteration and writes them, one line per iteration, once per interval.

    During a longer interval the number of the iteration is logged after the first one and every 30 seconds,
    so that no log is silent.

    The reports' numbers are on the device. They are read together and one iteration late, while the device is
    busy with the next iteration. `write_pending` reads immediately; call it before a synchronization.

    Args:
        writers: receive the metrics; empty on all ranks except one.
        schedule: provides the learning rate of each update.
        throughput: computes rates from tokens and time.
        timers: measured activities do not count as training time.
        interval: iterations between two writes.
        memory: measures this process's memory at the end of each interval.
        phases: times of the phases of training steps; None: they are not measured.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        writers: Sequence[MetricWriter],
        *,
        schedule: LearningRateSchedule,
        throughput: Throughput,
        timers: Timers,
        interval: int,
        memory: Callable[[], Mapping[str, float]] = dict,
        phases: Phases | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._phases = phases
        self._memory = memory
        self._writers = writers
        self._schedule = schedule
        self._throughput = throughput
        self._timers = timers
        self._interval = interval
        self._pending: list[tuple[int, dict[str, Tensor | float | None]]] = []

    def on_start(self, state: TrainState) -> None:
        """Start the timer."""
        self._pace = Pace(self._clock)
        self.on_resume(state)
        self._rate, self._momentum = self._schedule.current_rate, self._schedule.current_momentum
        self._first, self._logged = state.iteration + 1, self._clock()

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write the reports of a completed interval, and store this one."""
        if not self._writers:
            return
        seconds_per_iteration = self._pace.note(state.iteration)
        if (state.iteration - 1) % self._interval == 0:
            self.write_pending()
        metrics: dict[str, Tensor | float | None] = {
            "loss/train": report.loss,
            "optimizer/learning_rate": self._rate,
            "optimizer/momentum": self._momentum,
            "optimizer/grad_norm": report.grad_norm,
            "optimizer/loss_scale": report.loss_scale,
            _LIMIT: report.spike_limit,
            _SPIKE: report.spiked if isinstance(report.spiked, Tensor) else None,
        }
        if state.iteration % self._interval == 0 or state.finished:
            metrics |= self._speed(state)
            if seconds_per_iteration is not None:
                metrics["time/left"] = seconds_per_iteration * (state.last_iteration - state.iteration)
            self._logged = self._clock()
        elif state.iteration == self._first or self._clock() - self._logged >= 30.0:
            # The first one may compile for minutes, and a line of metrics follows only after the interval.
            logger.info(
                "iteration %d/%d after %.1f s; the next line of metrics follows iteration %d",
                state.iteration,
                state.last_iteration,
                self._clock() - self._logged,
                min(state.last_iteration, (state.iteration // self._interval + 1) * self._interval),
            )
            self._logged = self._clock()
        self._pending.append((state.iteration, metrics))
        self._rate, self._momentum = self._schedule.current_rate, self._schedule.current_momentum

    def on_pause(self, state: TrainState) -> None:
        """Write the reports so far."""
        self.write_pending()

    def on_resume(self, state: TrainState) -> None:
        """Measure from here on, so that the pause does not count as training time."""
        self._timers.read()
        if self._phases is not None:
            self._phases.read(0.0)
        self._pace.leave_out()
        self._written_tokens, self._written_iteration = state.tokens, state.iteration

    def on_end(self, state: TrainState) -> None:
        """Write the remaining reports."""
        self.write_pending()

    def write_pending(self) -> None:
        """Write all stored reports; waits for the device."""
        if not self._pending:
            return
        read = iter(read_back([value for _, metrics in self._pending for value in metrics.values()]))
        for iteration, metrics in self._pending:
            values = {name: next(read) for name in metrics}
            known = {name: value for name, value in values.items() if value is not None}
            for name in (_SKIPPED, _SPIKE):
                if not known.get(name):
                    known.pop(name, None)
            if math.isinf(known.get(_LIMIT, 0.0)):
                del known[_LIMIT]
            for writer in self._writers:
                writer.write(known, iteration)
        self._pending.clear()
        for writer in self._writers:
            writer.flush()

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write metrics of another hook, after the stored reports."""
        self.write_pending()
        for writer in self._writers:
            writer.write(metrics, iteration)
            writer.flush()

    def _speed(self, state: TrainState) -> dict[str, Tensor | float | None]:
        seconds, activities = self._timers.read()
        iterations = state.iteration - self._written_iteration
        metrics: dict[str, Tensor | float | None] = dict(
            self._throughput.rates(state.tokens - self._written_tokens, seconds)
        )
        metrics["time/iteration"] = seconds / iterations
        metrics |= {f"time/{name}": spent for name, spent in activities.items()}
        if self._phases is not None:
            phases = self._phases.read(seconds)
            metrics |= {f"time/{name}": spent / iterations for name, spent in phases.items()}
        metrics[_SKIPPED] = state.skipped_iterations
        metrics["progress/tokens"], metrics["progress/samples"] = state.tokens, state.samples
        metrics |= self._memory()
        self._written_tokens, self._written_iteration = state.tokens, state.iteration
        return metrics
