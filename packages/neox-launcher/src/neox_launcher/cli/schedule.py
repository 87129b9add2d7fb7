"""The command `neox-config schedule`: the values that change in the course of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from neox_config import Resolved
from neox_config.describe.tables import table
from neox_config.spec.schedule_preview import course_of, spread_iterations
from neox_launcher.cli.schedule_chart import draw_course

__all__ = ["show_course"]

_NUMBERS: dict[type, Callable[[Any], str]] = {int: "{:,}".format, float: "{:.6g}".format}


def show_course(resolved: Resolved, *, points: int, at: tuple[int, ...], plot: Path | None) -> None:
    """Print a table of the values, and draw them to a file if requested.

    Args:
        resolved: the configuration.
        points: number of iterations to print.
        at: iterations to print instead.
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
    if plot is not None:
        click.echo(f"\nwrote {plot}")


def _written(value: float) -> str:
    return _NUMBERS[type(value)](value)
