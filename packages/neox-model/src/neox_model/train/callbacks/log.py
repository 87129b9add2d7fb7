"""Log the loss, learning rate, gradient norm and throughput at a fixed interval."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self

import torch
from torch import Tensor

from neox_launcher.protocol.eta import Eta
from neox_model.metrics.bus import SKIPPED, SPIKE, SPIKE_LIMIT
from neox_model.metrics.memory import memory_metrics
from neox_model.metrics.timers import Timers, phase_times
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["LogCallback"]

logger = logging.getLogger(__name__)


class LogCallback(Callback):
    """Defers the report of each iteration, and writes them, one line per iteration, once per interval.

    During a longer interval the number of the iteration is logged after the first one and every 30 seconds,
    so that no log is silent. The numbers are read one iteration late, while the device is busy with the next
    iteration.

    Args:
        interval: iterations between two writes.
        memory: measures this process's memory at the end of each interval.
        phases: times of the phases of training steps; None: they are not measured.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        interval: int,
        *,
        memory: Callable[[], Mapping[str, float]] = dict,
        phases: Timers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval = interval
        self._memory, self._phases, self._clock = memory, phases, clock

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Build it; phases are measured on every rank, because measuring them synchronizes."""
        section, engine, phases = run.config.engine, run.engine, None
        if section.wall_clock_breakdown or section.flops_profiler.enabled:
            on_gpu = engine.device.type == "cuda"
            phases = Timers(partial(torch.cuda.synchronize, engine.device) if on_gpu else lambda: None)
            engine.measure_phases(phases.measure)
        return cls(
            run.config.logging.log_interval, memory=partial(memory_metrics, engine.device), phases=phases
        )

    def on_start(self) -> None:
        """Start the timer."""
        self._pace = Eta(self._clock)
        self.on_resume()
        self._rate, self._momentum = self.run.schedule.current_rate, self.run.schedule.current_momentum
        self._first, self._logged = self.run.state.iteration + 1, self._clock()

    def on_step(self, report: StepReport) -> None:
        """Write the reports of a completed interval, and defer this one."""
        if not self.run.metrics.writers:
            return
        state = self.run.state
        seconds_per_iteration = self._pace.note(state.iteration)
        if (state.iteration - 1) % self._interval == 0:
            self.run.metrics.write_pending()
        metrics: dict[str, Tensor | float | None] = {
            "loss/train": report.loss,
            "loss/z_loss": report.z_loss,
            "experts/load": report.expert_load,
            "experts/entropy": report.expert_entropy,
            "optimizer/learning_rate": self._rate,
            "optimizer/momentum": self._momentum,
            "optimizer/grad_norm": report.grad_norm,
            "optimizer/loss_scale": report.loss_scale,
            SPIKE_LIMIT: report.spike_limit,
            SPIKE: report.spiked if isinstance(report.spiked, Tensor) else None,
        }
        if state.iteration % self._interval == 0 or state.finished:
            metrics |= self._speed()
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
        self.run.metrics.defer(metrics, state.iteration)
        self._rate, self._momentum = self.run.schedule.current_rate, self.run.schedule.current_momentum

    def before_save(self) -> None:
        """Write the reports so far."""
        self.run.metrics.write_pending()

    settle = on_pause = on_end = before_save

    def on_resume(self) -> None:
        """Measure from here on, so that the pause does not count as training time."""
        self.run.timers.read()
        if self._phases is not None:
            self._phases.read()
        self._pace.leave_out()
        self._written_tokens, self._written_iteration = self.run.state.tokens, self.run.state.iteration

    def _speed(self) -> dict[str, Tensor | float | None]:
        state, (seconds, activities) = self.run.state, self.run.timers.read()
        iterations = state.iteration - self._written_iteration
        metrics: dict[str, Tensor | float | None] = dict(
            self.run.throughput.rates(state.tokens - self._written_tokens, seconds)
        )
        metrics["time/iteration"] = seconds / iterations
        metrics |= {f"time/{name}": spent for name, spent in activities.items()}
        if self._phases is not None:
            phases = phase_times(self._phases.read()[1], seconds)
            metrics |= {f"time/{name}": spent / iterations for name, spent in phases.items()}
        metrics[SKIPPED] = state.skipped_iterations
        metrics["progress/tokens"], metrics["progress/samples"] = state.tokens, state.samples
        metrics |= self._memory()
        self._written_tokens, self._written_iteration = state.tokens, state.iteration
        return metrics
