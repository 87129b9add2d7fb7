"""Show metrics as a live line on a terminal, or as log lines."""

import logging
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from neox_model.metrics.throughput import format_duration

__all__ = ["ConsoleWriter"]

logger = logging.getLogger("neox_model.train")

_FIELDS = {
    "loss/train": "loss {:.4f}",
    "optimizer/learning_rate": "lr {:.3e}",
    "optimizer/grad_norm": "grad norm {:.3f}",
    "optimizer/loss_scale": "loss scale {:g}",
    "optimizer/skipped_iterations": "{:.0f} updates skipped",
    "throughput/tokens_per_second": "{:,.0f} tokens/s",
    "throughput/tflops_per_device": "{:.3g} TFLOP/s",
    "throughput/mfu": "MFU {:.1%}",
}
"""Metric -> its format in the line, in this order."""


class ConsoleWriter:
    """Shows one line per interval, with the mean of the losses since the previous line.

    Args:
        last_iteration: last iteration of the training.
        console: console to write to; on a terminal, one live line is updated instead of logging. None:
            standard error.
    """

    def __init__(self, *, last_iteration: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._last_iteration = last_iteration
        self._losses: list[float] = []
        self._live = _start_live(console) if console.is_terminal else None

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Store the loss, and show the line at the end of an interval."""
        if "loss/train" in metrics:
            self._losses.append(metrics["loss/train"])
        if "throughput/tokens_per_second" not in metrics:
            return
        # Batches that were left out have no loss.
        mean_loss = {"loss/train": sum(self._losses) / len(self._losses)} if self._losses else {}
        self._losses.clear()
        line = self._line({**metrics, **mean_loss}, iteration)
        if self._live is None:
            logger.info(line)
        else:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def flush(self) -> None:
        """Do nothing; lines are shown immediately."""

    def close(self) -> None:
        """Leave the last line on the terminal."""
        if self._live is not None:
            self._live.stop()
            _point_logging_at_stderr()

    def _line(self, metrics: Mapping[str, float], iteration: int) -> str:
        parts = [f"iteration {iteration}/{self._last_iteration}"]
        parts += [text.format(metrics[name]) for name, text in _FIELDS.items() if name in metrics]
        if "time/left" in metrics:
            parts.append(f"{format_duration(metrics['time/left'])} left")
        return " | ".join(parts)


def _start_live(console: Console) -> Live:
    live = Live(console=console, auto_refresh=False)
    live.start()
    # A killed training must not leave the terminal without a cursor.
    console.show_cursor(True)
    _point_logging_at_stderr()
    return live


def _point_logging_at_stderr() -> None:
    """Point log handlers at the current `sys.stderr`, which rich replaces to keep its line at the bottom."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setStream(sys.stderr)
