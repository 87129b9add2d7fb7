"""The command `neox-launch verify-layout`."""

import sys

import click

from neox_config.command_line import PATH, Command, option
from neox_config.errors import NeoXError
from neox_launcher.cli.options import CONFIGURATION, directory_option, set_option
from neox_launcher.controller.terminal import finished_output, print_message
from neox_launcher.verify_layout.verify import LayoutVerification, verify_layouts

__all__ = ["verify_layout"]

_VERIFICATION, _OUTPUT = "Verification", "Output"


@click.command(
    "verify-layout",
    cls=Command,
    examples=(
        "neox-launch verify-layout 20B.yml",
        "neox-launch verify-layout small.yml --layout tp=2,sp=true --layout pp=2,schedule=zbv",
    ),
    exit_codes={0: "every layout computes the same as one process", 1: "a layout differs, or a run failed"},
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
    "--layout",
    "layouts",
    heading=_VERIFICATION,
    multiple=True,
    metavar="NAME=VALUE,...",
    help="A layout to verify: tp, pp, dp, sp, zero, schedule, or a parameter. May be given several times. "
    "Default: the configuration's own.",
)
@option(
    "--precision",
    heading=_VERIFICATION,
    type=click.Choice(["float64", "configured"]),
    help="Default: float64, where rounding is 1e-16; the configured one with DeepSpeed's engine.",
)
@option(
    "--devices",
    heading=_VERIFICATION,
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Processes on the CPUs of this machine, or one on each of its GPUs.",
)
@option(
    "--steps",
    heading=_VERIFICATION,
    type=click.IntRange(min=1, max=50),
    default=3,
    show_default=True,
    help="Number of updates.",
)
@option(
    "--full", heading=_VERIFICATION, is_flag=True, help="Keep the sizes of the model, which may take long."
)
@option("--json", "as_json", heading=_OUTPUT, is_flag=True, help="Print the result as JSON.")
@option("--keep", heading=_OUTPUT, is_flag=True, help="Keep the temporary files.")
@directory_option
@set_option
def verify_layout(
    files: tuple[str, ...],
    paths: tuple[str, ...],
    layouts: tuple[str, ...],
    precision: str | None,
    devices: str,
    steps: int,
    full: bool,
    as_json: bool,
    keep: bool,
    directory: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Verify that a layout computes the same as one process, before renting GPUs.

    Trains a small copy of the model on this machine's CPUs, on the layout and in one process, with the
    mechanisms of the configuration. Compares losses, every gradient, the gradient norm, updates and optimizer
    states, and says what a difference means. Needs no data, tokenizer, checkpoint or GPU.
    """
    paths += files
    if not paths:
        raise click.UsageError("name the configuration file, for example: neox-launch verify-layout x.yml")
    wanted = LayoutVerification(
        paths=paths,
        overrides=overrides,
        directory=directory,
        layouts=layouts,
        steps=steps,
        precision=precision,
        on_gpus=devices == "gpu",
        full=full,
        as_json=as_json,
        keep=keep,
    )
    with finished_output():
        try:
            outcome = verify_layouts(wanted)
        except NeoXError as error:
            print_message(f"{error}\n")
            sys.exit(error.exit_code)
        if outcome.first_failure is not None:
            print_message(f"\n{outcome.first_failure}\n")
        sys.exit(outcome.exit_code)
