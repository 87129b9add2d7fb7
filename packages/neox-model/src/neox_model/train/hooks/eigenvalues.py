"""Write the eigenvalues that were measured in an iteration."""

from collections.abc import Callable, Sequence

from neox_model.metrics.writers.base import MetricWriter
from neox_model.train.eigenvalues import Eigenvalues
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["EigenvaluesHook"]


class EigenvaluesHook(Hook):
    """Writes `Train/Eigenvalues/ModelBlockParam_N` of every layer after each measurement.

    Args:
        eigenvalues: what was measured.
        writers: receive them; empty on all ranks except one.
        interval: iterations between measurements.
        before_writing: called first, so that metrics are written in order.
    """

    def __init__(
        self,
        eigenvalues: Eigenvalues,
        *,
        writers: Sequence[MetricWriter],
        interval: int,
        before_writing: Callable[[], None],
    ) -> None:
        self._eigenvalues = eigenvalues
        self._writers, self._interval = writers, interval
        self._before_writing = before_writing

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write what was measured before this iteration."""
        if (state.iteration - 1) % self._interval:
            return
        self._before_writing()
        for writer in self._writers:
            writer.write(self._eigenvalues.metrics(), state.iteration)
