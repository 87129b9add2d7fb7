"""Write metrics like DeepSpeed's monitors: with its names, over samples instead of iterations."""

from collections.abc import Mapping

from neox_model.metrics.timers import DOCUMENTED_PHASES
from neox_model.metrics.writers.base import MetricWriter

__all__ = ["MonitorWriter"]

_NAMES = {
    "loss/train": "Train/Samples/train_loss",
    "optimizer/learning_rate": "Train/Samples/lr",
    "optimizer/loss_scale": "Train/Samples/loss_scale",
}
"""Our name -> DeepSpeed's name; other metrics keep their names."""
_TIMES = {f"time/{phase}": f"Train/Samples/elapsed_time_ms_{phase}" for phase in DOCUMENTED_PHASES}
"""The same, for times that we write in seconds and DeepSpeed in milliseconds."""


class MonitorWriter:
    """Passes metrics to a writer under the names of DeepSpeed's monitors.

    Args:
        inner: the writer; its steps are samples. Closed with this one.
        samples: samples per iteration, over all devices.
        interval: samples between two writes; metrics in between are dropped.
        before: iterations before this run, and the samples that they read.
    """

    def __init__(
        self, inner: MetricWriter, *, samples: int, interval: int = 1, before: tuple[int, int] = (0, 0)
    ) -> None:
        self.inner = inner
        self._samples = samples
        self._before = before
        self._interval = interval

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write the metrics of an iteration if an interval ended in it."""
        iterations, samples = self._before
        seen = samples + (iteration - iterations) * self._samples
        if seen // self._interval > (seen - self._samples) // self._interval:
            named = {_NAMES.get(name, name): value for name, value in metrics.items() if name not in _TIMES}
            named |= {_TIMES[name]: 1000 * value for name, value in metrics.items() if name in _TIMES}
            self.inner.write(named, seen)

    def flush(self) -> None:
        """Make all written metrics visible to readers."""
        self.inner.flush()

    def close(self) -> None:
        """Flush, and close files and connections."""
        self.inner.close()
