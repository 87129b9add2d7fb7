"""Show on stderr how much of a known amount is done: a live bar on a terminal, otherwise occasional lines."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from neox_data.preprocess.progress import clock, draws_bars

__all__ = ["report_amount", "report_search", "tracked"]

_SECONDS_BETWEEN_LINES = 10.0

# Formats an amount that is done, the whole amount, and the seconds since the start.
Describe = Callable[[int, int, float], str]
Item = TypeVar("Item")


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
    stream = stream or sys.stderr
    state = _State(total, describe)
    if is_quiet:
        yield lambda amount: None
        return
    if not draws_bars(stream):
        yield _Lines(state, stream)
        return
    columns = (BarColumn(bar_width=12), TaskProgressColumn(), TextColumn("{task.description}"))
    # Results go to stdout: above the bar if it is the same terminal.
    shares_terminal = sys.stdout.isatty()
    with Progress(
        *columns, console=Console(file=stream), transient=True, redirect_stdout=shares_terminal
    ) as progress:
        task = progress.add_task("", total=total)

        def report(amount: int) -> None:
            progress.update(task, completed=state.add(amount), description=str(state))

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


class _State:
    def __init__(self, total: int, describe: Describe) -> None:
        self._total, self._describe = total, describe
        self._done = 0
        self._started = time.monotonic()

    def add(self, amount: int) -> int:
        self._done += amount
        return self._done

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        left = clock(seconds * (self._total - self._done) / self._done) if self._done else "-"
        return f"{self._describe(self._done, self._total, seconds)}  {left} left"


class _Lines:
    def __init__(self, state: _State, stream: TextIO) -> None:
        self._state = state
        self._stream = stream
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES

    def __call__(self, amount: int) -> None:
        self._state.add(amount)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
        self._stream.write(f"{self._state}\n")
        self._stream.flush()
