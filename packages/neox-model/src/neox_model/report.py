"""`neox-report RUN_DIR`: the loss curve of a training as a picture, from its `metrics.jsonl`."""

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import click

from neox_model.metrics.writers.jsonl import read_metrics
from neox_model.optional import MissingPackageError, require

__all__ = ["draw_loss_curve", "main", "smoothed"]

_CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "loss/train": ("training", {"linewidth": 0.8, "alpha": 0.4}),
    "loss/validation": ("validation", {"marker": "o"}),
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="The picture; RUN_DIR/loss.png by default.")
def main(run_dir: Path, output: Path | None) -> None:
    """Draw the training and validation loss of the run whose log folder is RUN_DIR."""
    try:
        click.echo(draw_loss_curve(run_dir, output or run_dir / "loss.png"))
    except (MissingPackageError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def draw_loss_curve(run_dir: Path, picture: Path) -> Path:
    """Draw the losses over the iterations; the picture appears whole or not at all.

    Args:
        run_dir: holds `metrics.jsonl`.
        picture: a PNG.

    Returns:
        The picture's path.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: the record cannot be read or the picture not written.
        ValueError: the record holds no loss.
    """
    record = run_dir / "metrics.jsonl"
    curves = _read_curves(record)
    if not curves:
        raise ValueError(f"{record} holds no loss yet; report on a training that has written some iterations")
    require("matplotlib", because="neox-report", install="matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.add_subplot(
        xlabel="iteration", ylabel="loss (nats per token)", title=run_dir.resolve().name
    )
    for name, points in curves.items():
        label, style = _CURVES[name]
        (line,) = axes.plot(*zip(*points, strict=True), label=f"{label}, last {points[-1][1]:.3f}", **style)
        means = smoothed(points)
        if means:
            told = f"mean of {_window(points)}, last {means[-1][1]:.3f}"
            axes.plot(*zip(*means, strict=True), color=line.get_color(), label=told)
    axes.grid(alpha=0.3)
    axes.legend()
    aside = picture.with_name(f".{picture.name}.tmp")
    figure.savefig(aside, format="png", dpi=120)
    os.replace(aside, picture)
    return picture


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At each point the mean of it and those before it, over a twentieth of them; none where that is one."""
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


def _read_curves(record: Path) -> dict[str, list[tuple[int, float]]]:
    """(iteration, loss) per metric, for those that occur."""
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in _CURVES}
    for line in read_metrics(record):
        for name, points in curves.items():
            if name in line:
                points.append((line["iteration"], line[name]))
    return {name: points for name, points in curves.items() if points}
