"""The live line of a run as a function of its state, the time and the width; draws nothing itself."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from neox_config.formats import format_duration, format_mfu, format_tflops

__all__ = ["LiveState", "render_line"]

_SILENT_SECONDS = 60.0
_SILENT_ITERATIONS = 5.0
_SPINNER = "-\\-/"
_TURNS_PER_SECOND = 4
_SEPARATOR = " | "


_METRICS: Mapping[tuple[str, ...], tuple[Callable[..., str], str]] = {
    ("loss/train",): ("loss {:.4f}".format, "bold"),
    ("throughput/tokens_per_second",): ("{:,.0f} tokens/s".format, ""),
    ("throughput/mfu", "throughput/mfu_causal"): (format_mfu, ""),
    ("throughput/tflops_per_device",): (format_tflops, ""),
    ("optimizer/learning_rate",): ("lr {:.3e}".format, ""),
    ("optimizer/loss_scale",): ("loss scale {:g}".format, ""),
    ("loss/validation",): ("validation loss {:.4f}".format, ""),
    ("memory/bytes",): (lambda size: f"memory {size / 2**30:.1f} GiB", "dim"),
}
"""Metrics -> their format and its style, the most important first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """What the live line shows. Times are those of one monotonic clock, in seconds.

    Args:
        phase: what the job is doing besides training; empty if it is training.
        since: when the phase began.
        request: a request that the workers have not answered completely, such as `stopping`.
        iteration: last completed iteration; None before the first report.
        last_iteration: last iteration of the run.
        metrics: latest metrics of rank 0; those that are not shown are ignored.
        seconds_per_iteration: measured; None if it is not known yet.
        reported: when rank 0 reported last.
    """

    phase: str = ""
    since: float = 0.0
    request: str = ""
    iteration: int | None = None
    last_iteration: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds_per_iteration: float | None = None
    reported: float = 0.0

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last iteration; None if they are not known, or it is not the aim."""
        if self.request or self.iteration is None or self.seconds_per_iteration is None:
            return None
        left = (self.last_iteration or 0) - self.iteration
        return max(0.0, left * self.seconds_per_iteration - (now - self.reported)) if left > 0 else None

    def seconds_silent(self, now: float) -> float | None:
        """Return the seconds without a report if they are many more than an iteration takes, else None."""
        if self.phase or self.seconds_per_iteration is None:
            return None
        silent, many = now - self.reported, _SILENT_ITERATIONS * self.seconds_per_iteration
        return silent if silent > max(_SILENT_SECONDS, many) else None


def render_line(state: LiveState, *, now: float, width: int) -> Text:
    """Return the live line, at most `width` columns wide; the least important fields are left out first."""
    line = Text(no_wrap=True)
    for text, style in _fields(state, now):
        separator = _SEPARATOR if line else ""
        if line and line.cell_len + cell_len(separator + text) > width:
            break
        line.append(separator, "dim").append(text, style)
    line.truncate(max(0, width))
    return line


def _fields(state: LiveState, now: float) -> Iterator[tuple[str, str]]:
    """Yield the fields with their styles, the most important first."""
    left = state.seconds_left(now)
    if left is not None:
        yield f"{format_duration(left)} left", "green"
    if state.phase:
        turn = _SPINNER[int(now * _TURNS_PER_SECOND) % len(_SPINNER)]
        yield f"{turn} {state.phase} ({format_duration(max(0.0, now - state.since))})", "cyan"
    if state.request:
        yield state.request, "yellow"
    silent = state.seconds_silent(now)
    if silent is not None:
        yield f"no iteration for {format_duration(silent)}", "yellow"
    if state.iteration is not None:
        yield f"iteration {state.iteration:,}/{state.last_iteration or 0:,}", ""
    for names, (text, style) in _METRICS.items():
        if all(name in state.metrics for name in names):
            yield text(*(state.metrics[name] for name in names)), style
