"""Show the progress of a search on stderr: a live bar on a terminal, otherwise occasional lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from neox_data.preprocess.progress import clock, draws_bars

__all__ = ["report_search"]

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def report_search(
    num_tokens: int, *, is_quiet: bool = False, stream: TextIO | None = None
) -> Iterator[Callable[[int], None]]:
    """Provide a function that is called with the number of newly searched tokens, and shows the progress.

    Args:
        num_tokens: tokens in all.
        is_quiet: show nothing.
        stream: where to show it; None: stderr.
    """
    stream = stream or sys.stderr
    rate = _Rate(num_tokens)
    if is_quiet:
        yield lambda count: None
        return
    if not draws_bars(stream):
        yield _Lines(rate, stream)
        return
    columns = (BarColumn(bar_width=12), TaskProgressColumn(), TextColumn("{task.description}"))
    # Results go to stdout: above the bar if it is the same terminal.
    shares_terminal = sys.stdout.isatty()
    with Progress(
        *columns, console=Console(file=stream), transient=True, redirect_stdout=shares_terminal
    ) as progress:
        task = progress.add_task("", total=num_tokens)

        def report(count: int) -> None:
            progress.update(task, completed=rate.add(count), description=str(rate))

        yield report


class _Rate:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.done = 0
        self._started = time.monotonic()

    def add(self, count: int) -> int:
        self.done += count
        return self.done

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        left = clock(seconds * (self.num_tokens - self.done) / self.done) if self.done else "-"
        speed = self.done / seconds / 1e6
        return f"{self.done:,} of {self.num_tokens:,} tokens  {speed:,.0f} million/s  {left} left"


class _Lines:
    def __init__(self, rate: _Rate, stream: TextIO) -> None:
        self._rate = rate
        self._stream = stream
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __call__(self, count: int) -> None:
        self._rate.add(count)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
        self._stream.write(f"searched {self._rate}\n")
        self._stream.flush()
