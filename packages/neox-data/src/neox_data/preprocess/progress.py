"""How far a preprocessing run is: a live bar on a terminal, plain lines now and then elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

__all__ = ["Counts", "Reporter", "clock", "report_progress"]


@dataclass(slots=True)
class Counts:
    """What has been done so far.

    Attributes:
        documents: documents read and encoded.
        tokens: tokens written.
        num_bytes: bytes of (unpacked) corpus.
        fraction: how much of the input that is, 0 to 1.
        seconds: time since the start; above 0.
    """

    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    fraction: float = 0.0
    seconds: float = 1e-9

    def rates(self) -> str:
        """Speed so far and time left, for a reader."""
        left = f"{clock(self.seconds * (1 - self.fraction) / self.fraction)} left" if self.fraction else "-"
        return (
            f"{self.documents / self.seconds:,.0f} documents/s  {self.num_bytes / self.seconds / 1e6:,.1f} "
            "MB/s  "
            f"{self.tokens / self.seconds:,.0f} tokens/s  {left}"
        )


class Reporter(Protocol):
    """Is told the counts after each batch."""

    def __call__(self, counts: Counts) -> None:
        """Show them, or not."""


@contextmanager
def report_progress(*, log_interval: int, stream: TextIO | None = None) -> Iterator[Reporter]:
    """A reporter on stderr: a bar on a terminal, else a line after each `log_interval` documents or more."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _Lines(log_interval, stream)
        return
    columns = (BarColumn(bar_width=12), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def report(counts: Counts) -> None:
            progress.update(task, completed=counts.fraction, description=counts.rates())

        yield report


class _Lines:
    def __init__(self, log_interval: int, stream: TextIO) -> None:
        self._log_interval = log_interval
        self._stream = stream
        self._next = log_interval

    def __call__(self, counts: Counts) -> None:
        if counts.documents < self._next:
            return
        self._next = counts.documents + self._log_interval
        line = f"{counts.documents:,} documents ({counts.fraction:.0%})  {counts.rates()}\n"
        self._stream.write(line)
        self._stream.flush()


def clock(seconds: float) -> str:
    """A length of time as minutes and seconds, or hours before them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
