"""Show metrics as log lines; the live line of a terminal is the launcher's."""

import logging
from collections.abc import Callable, Mapping

from neox_config.formats import format_duration, format_mfu, format_tflops
from neox_config.pluralize import pluralize

__all__ = ["ConsoleWriter"]

logger = logging.getLogger("neox_model.train")

_FIELDS: Mapping[tuple[str, ...], Callable[..., str]] = {
    ("loss/train",): "loss {:.4f}".format,
    ("optimizer/learning_rate",): "lr {:.3e}".format,
    ("optimizer/grad_norm",): "grad norm {:.3f}".format,
    ("optimizer/loss_scale",): "loss scale {:g}".format,
    ("optimizer/skipped_iterations",): lambda skipped: f"{pluralize(int(skipped), 'update')} skipped",
    ("throughput/tokens_per_second",): "{:,.0f} tokens/s".format,
    ("throughput/tflops_per_device",): format_tflops,
    ("throughput/mfu", "throughput/mfu_causal"): format_mfu,
}
"""Metrics -> what formats them in the line, in this order."""


class ConsoleWriter:
    """Logs one line per interval, with the mean of the losses since the previous line.

    Args:
        last_iteration: last iteration of the run.
    """

    def __init__(self, *, last_iteration: int) -> None:
        self._last_iteration = last_iteration
        self._losses: list[float] = []

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Store the loss, and log the line at the end of an interval."""
        if "loss/train" in metrics:
            self._losses.append(metrics["loss/train"])
        if "throughput/tokens_per_second" not in metrics:
            return
        # Batches that were left out have no loss.
        mean_loss = {"loss/train": sum(self._losses) / len(self._losses)} if self._losses else {}
        self._losses.clear()
        shown = {**metrics, **mean_loss}
        parts = [f"iteration {iteration}/{self._last_iteration}"]
        parts += [
            text(*(shown[name] for name in names))
            for names, text in _FIELDS.items()
            if all(name in shown for name in names)
        ]
        if "time/left" in shown:
            parts.append(f"{format_duration(shown['time/left'])} left")
        logger.info(" | ".join(parts))

    def flush(self) -> None:
        """Do nothing; lines are logged immediately."""

    def close(self) -> None:
        """Do nothing; every line has been logged."""
