"""Metrics as lines for people: a live one on a terminal, log lines elsewhere."""

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
}
"""Metric -> how it reads in the line, in this order."""


class ConsoleWriter:
    """One line about training whenever a speed is written: the mean of the losses since the line before.

    Args:
        last_iteration: where the training ends.
        live: keep one line at the bottom of the terminal up to date instead of logging; None: if stderr is
            one.
    """

    def __init__(self, *, last_iteration: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._last_iteration = last_iteration
        self._losses: list[float] = []
        self._live = _start_live(console) if console.is_terminal else None

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Keep the loss, and show the line when its interval is over."""
        if "loss/train" in metrics:
            self._losses.append(metrics["loss/train"])
        if "throughput/tokens_per_second" not in metrics:
            return
        mean_loss = sum(self._losses) / len(self._losses)
        self._losses.clear()
        line = self._line({**metrics, "loss/train": mean_loss}, iteration)
        if self._live is None:
            logger.info(line)
        else:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def flush(self) -> None:
        """Nothing to do: lines are shown at once."""

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
    # A training may be killed: it must not leave the terminal without a cursor.
    console.show_cursor(True)
    _point_logging_at_stderr()
    return live


def _point_logging_at_stderr() -> None:
    """Let log handlers write to what `sys.stderr` is now: rich replaces it to keep its line below them."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            handler.setStream(sys.stderr)
