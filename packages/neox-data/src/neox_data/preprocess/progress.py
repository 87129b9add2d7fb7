"""Show the progress of preprocessing: a live bar on a terminal, otherwise occasional lines."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from neox_data.counted import counted

__all__ = ["Counts", "Reporter", "clock", "draws_bars", "report_progress"]

# Values of TERM of terminals on which no line can be drawn again.
_PLAIN_TERMINALS = ("", "dumb", "unknown")


@dataclass(slots=True)
class Counts:
    """Counts of the work done so far.

    Attributes:
        documents: documents read and encoded.
        tokens: tokens written.
        num_bytes: bytes of (uncompressed) corpus.
        fraction: fraction of the input, 0 to 1.
        seconds: time since the start; greater than 0.
    """

    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    fraction: float = 0.0
    seconds: float = 1e-9

    def rates(self) -> str:
        """Format the average speed and the time left."""
        left = f"{clock(self.seconds * (1 - self.fraction) / self.fraction)} left" if self.fraction else "-"
        tokens = f"  {self.tokens / self.seconds:,.0f} tokens/s" if self.tokens else ""
        return (
            f"{self.documents / self.seconds:,.0f} documents/s  {self.num_bytes / self.seconds / 1e6:,.1f} "
            f"MB/s{tokens}  {left}"
        )


class Reporter(Protocol):
    """Called with the counts after each batch."""

    def __call__(self, counts: Counts) -> None:
        """Show the counts."""


@contextmanager
def report_progress(*, log_interval: int | None, stream: TextIO | None = None) -> Iterator[Reporter]:
    """Provide a reporter on stderr: a bar on a terminal, else a line about every `log_interval` documents.

    Args:
        log_interval: documents between lines; None: show nothing, also on a terminal.
        stream: where to show it; None: stderr.
    """
    stream = stream or sys.stderr
    if log_interval is None:
        yield lambda counts: None
        return
    if not draws_bars(stream):
        yield _Lines(log_interval, stream)
        return
    columns = (BarColumn(bar_width=12), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def report(counts: Counts) -> None:
            progress.update(task, completed=counts.fraction, description=counts.rates())

        yield report


def draws_bars(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can draw a line again; elsewhere there are plain lines."""
    return stream.isatty() and os.environ.get("TERM", "") not in _PLAIN_TERMINALS


class _Lines:
    def __init__(self, log_interval: int, stream: TextIO) -> None:
        self._log_interval = log_interval
        self._stream = stream
        self._next = log_interval

    def __call__(self, counts: Counts) -> None:
        if counts.documents < self._next:
            return
        self._next = counts.documents + self._log_interval
        line = f"{counted(counts.documents, 'document')} ({counts.fraction:.0%})  {counts.rates()}\n"
        self._stream.write(line)
        self._stream.flush()


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds, with hours if any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
