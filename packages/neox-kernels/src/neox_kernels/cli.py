"""The command `neox-kernels`: compile the fused operators, or show their status.

Commands import what they use, because torch takes seconds to import.
"""

import importlib
import logging
import sys
from typing import ClassVar

import click

from neox_kernels import build as building
from neox_kernels.command_line import Command, Group, quiet_option
from neox_kernels.errors import KernelError

__all__ = ["main"]

# What may be given -> name in torch.
_DTYPES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
}


class _KernelCommand(Command):
    reported: ClassVar[tuple[type[Exception], ...]] = (KernelError,)


class _KernelCommands(Group):
    command_class = _KernelCommand


@click.group(
    cls=_KernelCommands,
    examples=("neox-kernels build", "neox-kernels status"),
)
@click.version_option(package_name="neox-kernels")
def main() -> None:
    """Compile the fused operators, or show their status."""


@main.command(
    examples=("neox-kernels build", "neox-kernels build --arch sm_80 --arch sm_90 --jobs 8"),
)
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    metavar="NAME",
    help="Architecture, for example sm_90. May be repeated. Default: those of the GPUs of this machine.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Number of parallel compilations.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), help="Limit in seconds for waiting and for compiling."
)
@quiet_option
def build(architectures: tuple[str, ...], jobs: int | None, timeout: float | None, quiet: bool) -> None:
    """Compile the operators for the GPUs of this machine, or for the given architectures."""
    _configure_logging(logging.WARNING if quiet else logging.INFO)
    wanted = architectures or importlib.import_module("neox_kernels.native").present_architectures()
    cuda = importlib.import_module("torch").version.cuda
    built = building.build(wanted, cuda=cuda, jobs=jobs, timeout_seconds=timeout)
    click.echo(f"{built.module}: {built.description}")


@main.command(examples=("neox-kernels status", "neox-kernels status --dtype float32"))
@click.option(
    "--dtype", type=click.Choice([*_DTYPES]), default="bfloat16", help="Dtype used to test the operators."
)
def status(dtype: str) -> None:
    """List the builds, and availability, correctness and speed of each operator."""
    _configure_logging(logging.INFO)
    for built in building.list_built():
        click.echo(f"{built.folder}: {built.description}")
    state = importlib.import_module("neox_kernels.native").state(may_build=False)
    click.echo(state.reason[0].upper() + state.reason[1:] + ".")
    operators = importlib.import_module("neox_kernels.status")
    tested = getattr(importlib.import_module("torch"), _DTYPES[dtype])
    for operator in operators.OPERATORS:
        click.echo(f"{operator.name:24}{operators.describe(operator, tested)}")


def _configure_logging(level: int) -> None:
    logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s")
