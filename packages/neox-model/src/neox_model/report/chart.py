"""Plot the loss curve of a run as a PNG file."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from neox_config.atomic import atomic_write
from neox_model.errors import ModelError
from neox_model.optional import require
from neox_model.report.markup import printable
from neox_model.report.reading import Run

__all__ = ["draw_loss_curve", "smoothed"]

_CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "loss/train": ("training", {"linewidth": 0.8, "alpha": 0.4}),
    "loss/validation": ("validation", {"marker": "o"}),
}


def draw_loss_curve(run: Run, picture: Path) -> Path:
    """Plot the losses by iteration; the file is written atomically.

    Args:
        run: the run.
        picture: PNG file to write.

    Returns:
        The path of the PNG file.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: the plot cannot be written.
        ModelError: the run has no loss.
    """
    columns = {name: run.columns[name] for name in _CURVES if name in run.columns}
    curves = {
        name: list(zip(column.iterations, column.values, strict=True)) for name, column in columns.items()
    }
    if not curves:
        raise ModelError(f"{run.record} contains no loss; wait until the run has logged some iterations")
    require("matplotlib", because="neox-report", install="matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.add_subplot(
        xlabel="iteration", ylabel="loss (nats per token)", title=printable(run.name)
    )
    for name, points in curves.items():
        label, style = _CURVES[name]
        (line,) = axes.plot(*zip(*points, strict=True), label=f"{label}, last {points[-1][1]:.3f}", **style)
        means = smoothed(points)
        if means:
            mean_label = f"mean of {_window(points)}, last {means[-1][1]:.3f}"
            axes.plot(*zip(*means, strict=True), color=line.get_color(), label=mean_label)
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(picture) as file:
        figure.savefig(file.buffer, format="png", dpi=120)
    return picture


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the moving average over a twentieth of the points; empty if that is one point."""
    window = _window(points)
    if window == 1:
        return []
    sums = [0.0, *accumulate(loss for _, loss in points)]
    return [
        (points[last][0], (sums[last + 1] - sums[last + 1 - window]) / window)
        for last in range(window - 1, len(points))
    ]


def _window(points: Sequence[tuple[int, float]]) -> int:
    return max(1, len(points) // 20)
