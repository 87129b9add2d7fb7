"""Show metrics as log lines; the live line of a terminal is the launcher's."""

import logging
from collections.abc import Callable, Mapping

from neox_config.counted import counted
from neox_model.metrics.throughput import format_duration

__all__ = ["ConsoleWriter"]

logger = logging.getLogger("neox_model.train")

_FIELDS: Mapping[str, str | Callable[[float], str]] = {
    "loss/train": "loss {:.4f}",
    "optimizer/learning_rate": "lr {:.3e}",
    "optimizer/grad_norm": "grad norm {:.3f}",
    "optimizer/loss_scale": "loss scale {:g}",
    "optimizer/skipped_iterations": lambda skipped: f"{counted(int(skipped), 'update')} skipped",
    "throughput/tokens_per_second": "{:,.0f} tokens/s",
    "throughput/tflops_per_device": "{:.3g} TFLOP/s",
    "throughput/mfu": "MFU {:.1%}",
}
"""Metric -> its format in the line, or a function that returns its text, in this order."""


class ConsoleWriter:
    """Logs one line per interval, with the mean of the losses since the previous line.

    Args:
        last_iteration: last iteration of the training.
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
        logger.info(self._line({**metrics, **mean_loss}, iteration))

    def flush(self) -> None:
        """Do nothing; lines are logged immediately."""

    def close(self) -> None:
        """Do nothing; every line has been logged."""

    def _line(self, metrics: Mapping[str, float], iteration: int) -> str:
        parts = [f"iteration {iteration}/{self._last_iteration}"]
        parts += [_shown(form, metrics[name]) for name, form in _FIELDS.items() if name in metrics]
        if "time/left" in metrics:
            parts.append(f"{format_duration(metrics['time/left'])} left")
        return " | ".join(parts)


def _shown(form: str | Callable[[float], str], value: float) -> str:
    return form.format(value) if isinstance(form, str) else form(value)
