"""The command `neox-launch coord-check`."""

import sys
from pathlib import Path

import click

from neox_config.command_line import PATH, Command, option
from neox_config.errors import NeoXError
from neox_launcher.cli.options import CONFIGURATION, directory_option, set_option
from neox_launcher.controller.terminal import finished_output, print_message
from neox_launcher.coord_check.check import CoordinateCheck, check_coordinates

__all__ = ["coord_check"]

_CHECK, _OUTPUT = "Check", "Output"


def _widths(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if len(widths) < 2 or sorted(set(widths)) != list(widths) or widths[0] < 1:
        raise click.BadParameter("must be increasing widths, such as 64,128,256", context, option)
    return widths


@click.command(
    "coord-check",
    cls=Command,
    examples=(
        "neox-launch coord-check small.yml",
        "neox-launch coord-check small.yml --widths 64,256,1024 --set optimizer.type=Muon",
    ),
    exit_codes={0: "activations change alike at all widths under muP", 1: "they do not, or a run failed"},
)
@click.argument("files", nargs=-1, type=PATH)
@option(
    "--config",
    "paths",
    heading=CONFIGURATION,
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="YAML configuration file. May be given several times. The name alone is enough.",
)
@option(
    "--widths",
    heading=_CHECK,
    default="64,128,256,512,1024",
    show_default=True,
    callback=_widths,
    metavar="N,...",
    help="Values of hidden-size; heads and MLP grow in proportion. The first one is the base model.",
)
@option(
    "--steps",
    heading=_CHECK,
    type=click.IntRange(min=1, max=50),
    default=5,
    show_default=True,
    help="Number of updates.",
)
@option(
    "--limit",
    heading=_CHECK,
    type=click.FloatRange(min=0, min_open=True),
    default=0.05,
    show_default=True,
    help="Largest slope of a hidden layer under muP.",
)
@option(
    "--devices",
    heading=_CHECK,
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Run on the CPUs of this machine, or on a GPU.",
)
@option(
    "-o",
    "--output",
    heading=_OUTPUT,
    type=click.Path(dir_okay=False, path_type=Path),
    default="coord-check.html",
    show_default=True,
    help="Page of the plots.",
)
@directory_option
@set_option
def coord_check(
    files: tuple[str, ...],
    paths: tuple[str, ...],
    widths: tuple[int, ...],
    steps: int,
    limit: float,
    devices: str,
    output: Path,
    directory: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Check that muP keeps the sizes of activations the same at all widths.

    Trains small copies of the model for a few updates, with and without muP, and compares how much the
    activations of each kind of layer change. Prints the slope of the logarithm of the change by that of the
    width: 0 if it does not depend on the width. Needs no data, tokenizer or checkpoint.
    """
    paths += files
    if not paths:
        raise click.UsageError("name the configuration file, for example: neox-launch coord-check x.yml")
    wanted = CoordinateCheck(
        paths=paths,
        overrides=overrides,
        directory=directory,
        widths=widths,
        steps=steps,
        limit=limit,
        on_gpu=devices == "gpu",
        page=output,
    )
    with finished_output():
        try:
            outcome = check_coordinates(wanted)
        except NeoXError as error:
            print_message(f"{error}\n")
            sys.exit(error.exit_code)
        if outcome.first_failure is not None:
            print_message(f"\n{outcome.first_failure}\n")
        sys.exit(outcome.exit_code)
