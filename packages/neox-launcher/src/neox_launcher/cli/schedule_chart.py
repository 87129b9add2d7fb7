"""Chart of a run's course as a PNG. Requires matplotlib: pip install "neox-launcher[plot]"."""

from pathlib import Path
from typing import Any

from neox_config import Resolved
from neox_config.atomic import atomic_write
from neox_config.errors import NeoXError
from neox_config.spec.schedule_preview import course_of, spread_iterations

__all__ = ["draw_course"]

_POINTS = 2000


def draw_course(resolved: Resolved, picture: Path) -> None:
    """Draw learning rate, batch size, sequence length, a changing momentum and difficulties by iteration.

    Args:
        resolved: the configuration.
        picture: PNG file to write, atomically.

    Raises:
        NeoXError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NeoXError(
            f'--output requires matplotlib ({error}); pip install "neox-launcher[plot]", or remove --output'
        ) from error
    course, iterations = course_of(resolved), spread_iterations(resolved, _POINTS)
    figure = Figure(figsize=(8, 2.2 * len(course)), layout="constrained")
    charts: Any = figure.subplots(len(course), sharex=True)
    for axes, (name, value) in zip(charts, course.items(), strict=True):
        values = [value(iteration) for iteration in iterations]
        axes.plot(iterations, values, drawstyle="steps-post")
        axes.set_ylabel(name)
        axes.set_ylim(0, 1.05 * max(values) or 1)
        axes.grid(alpha=0.3)
    charts[-1].set_xlabel("iteration")
    try:
        with atomic_write(picture) as file:
            figure.savefig(file.buffer, format="png", dpi=120)
    except OSError as error:
        raise NeoXError(
            f"--output: {picture} cannot be written: {error.strerror}; name another file"
        ) from error
