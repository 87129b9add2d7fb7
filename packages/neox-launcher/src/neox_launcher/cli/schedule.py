"""The command `neox-config schedule`: the values that change in the course of a run."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import click

from neox_config import Resolved
from neox_config.describe.tables import table
from neox_config.pluralize import pluralize
from neox_config.spec.schedule_preview import course_of, spread_iterations
from neox_launcher.cli.schedule_chart import draw_course

__all__ = ["show_course"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ROWS = 6
# With labels of at most eleven characters, 80 columns are not exceeded.
_COLUMNS = 66
_NUMBERS: dict[type, Callable[[Any], str]] = {int: "{:,}".format, float: "{:.6g}".format}


def show_course(resolved: Resolved, *, points: int, at: tuple[int, ...], plot: Path | None) -> None:
    """Print a table and drawings of the values, and draw them to a file if requested.

    Args:
        resolved: the configuration.
        points: number of iterations to print.
        at: iterations to print instead, without drawings.
        plot: PNG file to write.

    Raises:
        NeoXError: the chart cannot be drawn or written; nothing is printed.
    """
    if plot is not None:
        draw_course(resolved, plot)
    course = course_of(resolved)
    iterations = at or spread_iterations(resolved, points)
    rows = [("iteration", *course)]
    rows += [
        (f"{iteration:,}", *(_written(value(iteration)) for value in course.values()))
        for iteration in iterations
    ]
    click.echo(table(rows, left=range(1, len(rows[0]))))
    if not at:
        places = spread_iterations(resolved, 16 * _COLUMNS)
        for name, value in course.items():
            click.echo("\n" + "\n".join(drawn(name, value, places)))
    if plot is not None:
        click.echo(f"\nwrote {plot}")


def drawn(name: str, value: Callable[[int], float], iterations: Sequence[int]) -> list[str]:
    """Return lines of text, at most 80 columns wide, that draw a value: each column its largest one there.

    Args:
        name: of the value.
        value: returns it by iteration, counted from 0.
        iterations: where it is drawn, in order; the last one of the run is the last.
    """
    last = iterations[-1]
    width = min(_COLUMNS, last + 1)
    found: dict[int, float] = {}
    every = {iteration: value(iteration) for iteration in iterations}
    for iteration, each in every.items():
        column = iteration * width // (last + 1)
        found[column] = max(each, found.get(column, -inf))
    values = [found[column] for column in sorted(found)]
    low, high = min(every.values()), max(values)
    if low == high:
        return [f"{name}: {_written(values[0])} in all {pluralize(last + 1, 'iteration')}"]
    # The lowest value is a line, not nothing.
    heights = [1 + round((each - low) / (high - low) * (8 * _ROWS - 1)) for each in values]
    labels = [_written(high), *[""] * (_ROWS - 2), _written(low)]
    margin = max(map(len, labels))
    lines = [name]
    for row, label in enumerate(labels):
        below = 8 * (_ROWS - 1 - row)
        cells = "".join(_BLOCKS[min(8, max(0, height - below))] for height in heights)
        lines.append(f"{label:>{margin}} {cells}".rstrip())
    first, end = "iteration 0", f"{last:,}"
    return [*lines, f"{'':{margin}} {first}{end:>{max(len(end) + 1, width - len(first))}}"]


def _written(value: float) -> str:
    return _NUMBERS[type(value)](value)
