"""The interface of training hooks, and the hook that writes what a function measures."""

from collections.abc import Callable, Mapping

from neox_model.train.state import StepReport, TrainState

__all__ = ["Hook", "MetricsHook", "Write"]

Write = Callable[[Mapping[str, float], int], None]
"""Writes metrics of an iteration, after those of earlier ones; does nothing on all ranks except one."""


class Hook:
    """Base class of callbacks of the training loop; methods do nothing unless overridden.

    All ranks have the same hooks in the same order, so a hook may communicate.
    """

    def on_start(self, state: TrainState) -> None:
        """Run before the first iteration of this process."""

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Run after every iteration, which `state` already counts."""

    def on_pause(self, state: TrainState) -> None:
        """Undo what the hook changed in this process, such as signal handlers.

        Called after `on_end` of all hooks, when a program leaves the loop after an iteration and may continue
        it later, and when it continues itself after an error. May be called twice.
        """

    def on_resume(self, state: TrainState) -> None:
        """Run before the next iteration after `on_pause`."""

    def on_end(self, state: TrainState) -> None:
        """Run after the last iteration of this process; not called after an error."""


class MetricsHook(Hook):
    """Writes what a function measures, once per interval.

    Args:
        measure: returns the metrics, on one rank or on all; empty: nothing is written. May be collective over
            all ranks.
        interval: iterations between two writes.
        after: the iteration of an interval after which it writes; 0: its last one.
        write: writes them.
    """

    def __init__(
        self, measure: Callable[[], Mapping[str, float]], *, interval: int, after: int = 0, write: Write
    ) -> None:
        self._measure = measure
        self._interval = interval
        self._after = after
        self._write = write

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Measure and write if it is due."""
        if (state.iteration - self._after) % self._interval == 0:
            metrics = self._measure()
            if metrics:
                self._write(metrics, state.iteration)
