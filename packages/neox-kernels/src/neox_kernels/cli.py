"""`neox-kernels`: compile the fused operators, or say how they stand."""

import logging
import sys

import click
import torch

from neox_kernels import build as building
from neox_kernels import native
from neox_kernels.errors import KernelError
from neox_kernels.status import OPERATORS, describe

__all__ = ["main"]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@click.group(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Fused operators for transformers: compile them, or see how they stand."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")


@main.command()
@click.option("--arch", "architectures", multiple=True, help="Architecture like sm_90; repeat for several.")
@click.option("--jobs", type=click.IntRange(min=1), help="How many compilers run at the same time.")
@click.option("--timeout", type=click.FloatRange(min=1), help="Seconds to wait and to compile at most.")
def build(architectures: tuple[str, ...], jobs: int | None, timeout: float | None) -> None:
    """Compile the operators for the present GPUs, or for the architectures named."""
    try:
        built = building.build(
            architectures or native.present_architectures(), jobs=jobs, timeout_seconds=timeout
        )
    except KernelError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    click.echo(f"{built.module}: {built.description}")


@main.command()
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", help="Type to test with.")
def status(dtype: str) -> None:
    """Say of each operator whether it is compiled, for what, why not, whether it is right, and how fast."""
    for built in building.list_built():
        click.echo(f"{built.folder}: {built.description}")
    state = native.state(may_build=False)
    click.echo(state.reason[0].upper() + state.reason[1:] + ".")
    for operator in OPERATORS:
        click.echo(f"{operator.name:24}{describe(operator, DTYPES[dtype])}")
