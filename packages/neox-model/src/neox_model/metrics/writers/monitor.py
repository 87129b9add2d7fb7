"""DeepSpeed's view of a training: its names for metrics, over samples instead of iterations."""

from collections.abc import Mapping

from neox_model.metrics.writers.base import MetricWriter

__all__ = ["MonitorWriter"]

_NAMES = {
    "loss/train": "Train/Samples/train_loss",
    "optimizer/learning_rate": "Train/Samples/lr",
    "optimizer/loss_scale": "Train/Samples/loss_scale",
}
"""Ours -> DeepSpeed's; what DeepSpeed has no name for keeps its own."""


class MonitorWriter:
    """Hands metrics on under the names that DeepSpeed's monitors document.

    Args:
        inner: writes them; its steps are samples. Closed with this one.
        samples: of one iteration, over all devices.
        interval: samples between two hand-overs; what falls between is left out.
        before: iterations before this run, and the samples that they read, at whatever batch size.
    """

    def __init__(
        self, inner: MetricWriter, *, samples: int, interval: int = 1, before: tuple[int, int] = (0, 0)
    ) -> None:
        self._inner = inner
        self._samples = samples
        self._before = before
        self._interval = interval

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Hand the numbers of an iteration on, if an interval ended in it."""
        iterations, samples = self._before
        seen = samples + (iteration - iterations) * self._samples
        if seen // self._interval > (seen - self._samples) // self._interval:
            self._inner.write({_NAMES.get(name, name): value for name, value in metrics.items()}, seen)

    def flush(self) -> None:
        """Make everything written so far visible to readers."""
        self._inner.flush()

    def close(self) -> None:
        """Flush and let go of files and connections."""
        self._inner.close()
