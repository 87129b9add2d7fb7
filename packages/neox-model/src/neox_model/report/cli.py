"""The command `neox-report`."""

from pathlib import Path

import click

from neox_config.atomic import atomic_write
from neox_config.command_line import Command, NamedPath
from neox_model.errors import ModelError
from neox_model.report.chart import draw_loss_curve
from neox_model.report.page import render_page
from neox_model.report.reading import RecordError, read_runs

__all__ = ["main"]


@click.command(
    cls=Command,
    examples=("neox-report runs/2026-11-23", "neox-report runs/first runs/second --output comparison.html"),
)
@click.version_option(package_name="neox-model")
@click.argument(
    "runs",
    metavar="RUN [RUN ...]",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
)
@click.option(
    "--output",
    type=NamedPath(".html"),
    help="Page to write. Default: report.html in the first RUN; report.N.html for metrics.N.jsonl.",
)
@click.option(
    "--png",
    type=NamedPath(".png"),
    help="Loss plot to write. Default, for a single RUN: loss.png in it, or OUTPUT with .png.",
)
def main(runs: tuple[Path, ...], output: Path | None, png: Path | None) -> None:
    """Write one HTML page about the runs with the log folders RUN (log-dir), and plot the loss.

    RUN may also be the record of an earlier run: a run that starts from the beginning renames the
    metrics.jsonl that it finds in its log-dir to metrics.1.jsonl, or the next free number.

    The page opens without a network: curves of the loss, learning rate, norms, throughput and memory,
    evaluations, restarts and their causes, skipped updates and loss spikes with their documents, the
    configuration with the origin of each value, and the estimate next to the measurements. With several runs
    it compares them: what differs in configuration, data, packages and code.
    """
    page = output or _beside(runs[0], "report.html")
    try:
        found = read_runs(runs)
        text = render_page(found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Every value of a record is used somewhere; none is checked before.
        named = ", ".join(map(str, runs))
        raise RecordError(
            f"a record in {named} has a value of another kind than this version writes "
            f"({type(error).__name__}: {error}); restore the file, or remove the line that was changed"
        ) from error
    picture = png
    if picture is None and len(runs) == 1:
        picture = _beside(runs[0], "loss.png") if output is None else output.with_suffix(".png")
    written, failure = [page], None
    # Without the plot that was asked for, the page is not written either.
    with atomic_write(page) as file:
        file.write(text)
        file.flush()
        try:
            if picture is not None:
                written.append(draw_loss_curve(found[0], picture))
        except (ModelError, OSError) as error:
            if png is not None:
                raise
            failure = error
    for path in written:
        click.echo(click.format_filename(path))
    if failure is not None:
        click.echo(f"no plot: {failure}", err=True)


def _beside(run: Path, name: str) -> Path:
    """Return the file to write in a log folder; for metrics.1.jsonl report.html becomes report.1.html."""
    if run.is_dir():
        return run / name
    return run.with_name(f"{Path(name).stem}{Path(run.stem).suffix}{Path(name).suffix}")
