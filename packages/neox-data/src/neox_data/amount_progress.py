"""Show progress on stderr: a live bar on a terminal, otherwise occasional lines."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from neox_data.pluralize import pluralize

__all__ = ["Counts", "Reporter", "report_amount", "report_progress", "report_search", "tracked"]

_SECONDS_BETWEEN_LINES = 10.0
# Values of TERM of terminals on which no line can be drawn again.
_PLAIN_TERMINALS = ("", "dumb", "unknown")

# Formats an amount that is done, the whole amount, and the seconds since the start.
Describe = Callable[[int, int, float], str]
Item = TypeVar("Item")


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
        tokens = f"  {self.tokens / self.seconds:,.0f} tokens/s" if self.tokens else ""
        return (
            f"{self.documents / self.seconds:,.0f} documents/s  {self.num_bytes / self.seconds / 1e6:,.1f} "
            f"MB/s{tokens}  {_left(self.seconds, self.fraction)}"
        )


Reporter = Callable[[Counts], None]
"""Called with the counts after each batch."""


class _Show(Protocol):
    """Shows the fraction that is done and a text; a line begins with a label, and has a position."""

    def __call__(self, fraction: float, text: str, *, position: float, label: str = "") -> None: ...


@contextmanager
def _display(
    interval: float, first: float, *, is_quiet: bool = False, stream: TextIO | None = None
) -> Iterator[_Show]:
    """Provide a function that shows progress.

    Args:
        interval: least distance between the positions of lines.
        first: position of the first line.
        is_quiet: show nothing.
        stream: where to show it; None: stderr.
    """
    stream, due = stream or sys.stderr, first

    def write(fraction: float, text: str, *, position: float, label: str = "") -> None:
        nonlocal due
        if position >= due and not is_quiet:
            due = position + interval
            stream.write(f"{label}{text}\n")
            stream.flush()

    def draw(fraction: float, text: str, *, position: float, label: str = "") -> None:
        progress.update(task, completed=fraction, description=text)

    if is_quiet or not stream.isatty() or os.environ.get("TERM", "") in _PLAIN_TERMINALS:
        yield write
        return
    columns = (BarColumn(bar_width=12), TaskProgressColumn(), TextColumn("{task.description}"))
    # Results go to stdout: above the bar if it is the same terminal.
    shares = sys.stdout.isatty()
    with Progress(*columns, console=Console(file=stream), transient=True, redirect_stdout=shares) as progress:
        task = progress.add_task("", total=1.0)
        yield draw


@contextmanager
def report_progress(*, log_interval: int | None, stream: TextIO | None = None) -> Iterator[Reporter]:
    """Provide a reporter on stderr: a bar on a terminal, else a line about every `log_interval` documents.

    Args:
        log_interval: documents between lines; None: show nothing, also on a terminal.
        stream: where to show it; None: stderr.
    """
    interval = log_interval or 0

    def report(counts: Counts) -> None:
        label = f"{pluralize(counts.documents, 'document')} ({counts.fraction:.0%})  "
        show(counts.fraction, counts.rates(), position=counts.documents, label=label)

    with _display(interval, interval, is_quiet=log_interval is None, stream=stream) as show:
        yield report


@contextmanager
def report_amount(
    total: int, describe: Describe, *, is_quiet: bool = False, stream: TextIO | None = None
) -> Iterator[Callable[[int], None]]:
    """Provide a function that is called with the amount that was newly done, and shows the progress.

    Args:
        total: the whole amount.
        describe: formats the progress; the time left is added.
        is_quiet: show nothing.
        stream: where to show it; None: stderr.
    """
    started, done = time.monotonic(), 0

    def report(amount: int) -> None:
        nonlocal done
        done += amount
        now = time.monotonic()
        seconds, fraction = max(now - started, 1e-9), done / max(total, 1)
        show(fraction, f"{describe(done, total, seconds)}  {_left(seconds, fraction)}", position=now)

    interval = _SECONDS_BETWEEN_LINES
    with _display(interval, started + interval, is_quiet=is_quiet, stream=stream) as show:
        yield report


def report_search(
    num_tokens: int, *, is_quiet: bool = False, stream: TextIO | None = None
) -> AbstractContextManager[Callable[[int], None]]:
    """Report the progress of a search through `num_tokens` tokens, with its speed; see `report_amount`."""

    def describe(done: int, total: int, seconds: float) -> str:
        return f"searched {done:,} of {total:,} tokens  {done / seconds / 1e6:,.0f} million/s"

    return report_amount(num_tokens, describe, is_quiet=is_quiet, stream=stream)


@contextmanager
def tracked(
    items: Iterable[Item], total: int, done: str, *, stream: TextIO | None = None
) -> Iterator[Iterator[Item]]:
    """Provide an iterator over items that shows how many of them are done.

    Args:
        items: the items.
        total: their number.
        done: what has been done with how many of them, such as "tensors compared".
        stream: where to show it; None: stderr.
    """

    def describe(count: int, total: int, seconds: float) -> str:
        return f"{count:,} of {total:,} {done}"

    def reported() -> Iterator[Item]:
        for item in items:
            yield item
            report(1)

    with report_amount(total, describe, stream=stream) as report:
        yield reported()


def _left(seconds: float, fraction: float) -> str:
    """Format the time left as minutes and seconds, with hours if any."""
    if not fraction:
        return "- left"
    minutes, rest = divmod(round(seconds * (1 - fraction) / fraction), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"
