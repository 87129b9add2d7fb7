"""The command `neox-kernels`: compile the fused operators, or show their status."""

import logging
import sys
from typing import Any

import click
import torch

from neox_kernels import build as building
from neox_kernels import native
from neox_kernels.errors import KernelError
from neox_kernels.output import checked_output
from neox_kernels.status import OPERATORS, describe

__all__ = ["main"]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class _Commands(click.Group):
    """Command group that reports a standard output that cannot be written to, such as a full disk."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        with checked_output():
            return super().main(*args, **kwargs)


@click.group(cls=_Commands, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="neox-kernels")
def main() -> None:
    """Compile the fused operators, or show their status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")


@main.command()
@click.option(
    "--arch", "architectures", multiple=True, help="Architecture, for example sm_90. Repeat for several."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Number of parallel compilations.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), help="Limit in seconds for waiting and for compiling."
)
def build(architectures: tuple[str, ...], jobs: int | None, timeout: float | None) -> None:
    """Compile the operators for the GPUs of this machine, or for the given architectures."""
    try:
        built = building.build(
            architectures or native.present_architectures(), jobs=jobs, timeout_seconds=timeout
        )
    except KernelError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    click.echo(f"{built.module}: {built.description}")


@main.command()
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", help="Dtype used to test the operators."
)
def status(dtype: str) -> None:
    """List the builds, and availability, correctness and speed of each operator."""
    for built in building.list_built():
        click.echo(f"{built.folder}: {built.description}")
    state = native.state(may_build=False)
    click.echo(state.reason[0].upper() + state.reason[1:] + ".")
    for operator in OPERATORS:
        click.echo(f"{operator.name:24}{describe(operator, DTYPES[dtype])}")
