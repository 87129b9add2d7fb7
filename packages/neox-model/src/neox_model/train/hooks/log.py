"""Writes the loss, the learning rate, the gradient norm and the speed, every so many iterations."""

from collections.abc import Sequence

from torch import Tensor

from neox_model.metrics.throughput import Throughput
from neox_model.metrics.timers import Timers
from neox_model.metrics.writers import MetricWriter
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.train.hooks.base import Hook
from neox_model.train.read_back import read_back
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["LogHook"]

# Written only once an update has been skipped.
_SKIPPED = "optimizer/skipped_iterations"


class LogHook(Hook):
    """Keeps each iteration's report and writes them all, one line per iteration, once per interval.

    The reports' numbers lie on the device. They are read together and one iteration late, when the device
    is already busy with the next one; `write_pending` reads at once, for whoever is about to wait for the
    device anyway.

    Args:
        writers: where numbers go; none on all ranks but one.
        schedule: asked for the learning rate that each update used.
        throughput: makes rates of tokens and time.
        timers: what is measured as an activity does not count as training time.
        interval: iterations between two writings.
    """

    def __init__(
        self,
        writers: Sequence[MetricWriter],
        *,
        schedule: LearningRateSchedule,
        throughput: Throughput,
        timers: Timers,
        interval: int,
    ) -> None:
        self._writers = writers
        self._schedule = schedule
        self._throughput = throughput
        self._timers = timers
        self._interval = interval
        self._pending: list[tuple[int, dict[str, Tensor | float | None]]] = []

    def on_start(self, state: TrainState) -> None:
        """Start the clock."""
        self._timers.read()
        self._rate = self._schedule.current_rate
        self._written_tokens, self._written_iteration = state.tokens, state.iteration

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write the reports of an interval that is over, and keep this one."""
        if not self._writers:
            return
        if (state.iteration - 1) % self._interval == 0:
            self.write_pending()
        metrics: dict[str, Tensor | float | None] = {
            "loss/train": report.loss,
            "optimizer/learning_rate": self._rate,
            "optimizer/grad_norm": report.grad_norm,
            "optimizer/loss_scale": report.loss_scale,
        }
        if state.iteration % self._interval == 0 or state.finished:
            metrics |= self._speed(state)
        self._pending.append((state.iteration, metrics))
        self._rate = self._schedule.current_rate

    def on_end(self, state: TrainState) -> None:
        """Write what is left."""
        self.write_pending()

    def write_pending(self) -> None:
        """Write all reports kept so far; waits for the device."""
        if not self._pending:
            return
        read = iter(read_back([value for _, metrics in self._pending for value in metrics.values()]))
        for iteration, metrics in self._pending:
            values = {name: next(read) for name in metrics}
            known = {name: value for name, value in values.items() if value is not None}
            if not known.get(_SKIPPED):
                known.pop(_SKIPPED, None)
            for writer in self._writers:
                writer.write(known, iteration)
        self._pending.clear()
        for writer in self._writers:
            writer.flush()

    def _speed(self, state: TrainState) -> dict[str, Tensor | float | None]:
        seconds, activities = self._timers.read()
        iterations = state.iteration - self._written_iteration
        metrics: dict[str, Tensor | float | None] = dict(
            self._throughput.rates(state.tokens - self._written_tokens, seconds)
        )
        metrics["time/iteration"] = seconds / iterations
        metrics["time/left"] = seconds / iterations * (state.last_iteration - state.iteration)
        metrics |= {f"time/{name}": spent for name, spent in activities.items()}
        metrics[_SKIPPED] = state.skipped_iterations
        self._written_tokens, self._written_iteration = state.tokens, state.iteration
        return metrics
