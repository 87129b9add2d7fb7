"""The base of callbacks that only write metrics."""

from collections.abc import Mapping

from neox_model.train.run import Callback
from neox_model.train.state import StepReport

__all__ = ["Measurement"]


class Measurement(Callback):
    """Writes what it measures, once per interval.

    Args:
        interval: iterations between two writes.
        after: the iteration of an interval after which it writes; 0: its last one.
    """

    def __init__(self, interval: int, *, after: int = 0) -> None:
        self._interval, self._after = interval, after

    def measure(self) -> Mapping[str, float]:
        """Return the metrics, on one rank or on all; may be collective over all ranks."""
        raise NotImplementedError

    def is_due(self, iteration: int) -> bool:
        """Return True if it writes after this iteration."""
        return (iteration - self._after) % self._interval == 0

    def on_step(self, report: StepReport) -> None:
        """Measure and write if it is due."""
        if self.is_due(self.run.state.iteration):
            self.run.metrics.write(self.measure(), self.run.state.iteration)
