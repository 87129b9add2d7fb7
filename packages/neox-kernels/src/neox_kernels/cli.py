"""The command `neox-kernels`: compile the fused operators, or show their status.

Commands import what they use, because torch takes seconds to import.
"""

import importlib
import logging
import os
import sys
from traceback import walk_tb
from typing import Any

import click

from neox_kernels import build as building
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
_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110}
_EXIT_CODES = """\b
Exit codes:
  0    success
  1    failure
  2    invalid request
  130  interrupted by Ctrl-C"""


class _Program(click.Group):
    """A program that reports each error in one message."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, and report its error."""
        # A closed standard output (`>&-`) is one that cannot be written to.
        sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
        # Bytes of file names, and characters that its encoding lacks, are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            return super().main(*args, **kwargs)
        except (KernelError, OSError) as error:
            message = f"Error: {error}"
            if any(frame.f_code is click.echo.__code__ for frame, _ in walk_tb(error.__traceback__)):
                message = f"standard output cannot be written to: {getattr(error, 'strerror', error)}"
                # Python would write the rest when it exits.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(message, err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click's own exit code after Ctrl-C is 1."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo("\ninterrupted", err=True)
            ctx.exit(130)


def _settings(*examples: str) -> dict[str, Any]:
    """Return the settings of a command whose help ends with examples and exit codes."""
    shown = "\n  ".join(["\b\nExamples:", *examples])
    return {"context_settings": _SETTINGS, "epilog": f"{shown}\n\n{_EXIT_CODES}"}


@click.group(cls=_Program, **_settings("neox-kernels build", "neox-kernels status"))
@click.version_option(package_name="neox-kernels")
def main() -> None:
    """Compile the fused operators, or show their status."""


@main.command(**_settings("neox-kernels build", "neox-kernels build --arch sm_80 --arch sm_90 --jobs 8"))
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
@click.option("-q", "--quiet", is_flag=True, help="Show no progress; notes and errors are printed.")
def build(architectures: tuple[str, ...], jobs: int | None, timeout: float | None, quiet: bool) -> None:
    """Compile the operators, for the GPUs of this machine or for --arch."""
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s")
    wanted = architectures or importlib.import_module("neox_kernels.native").present_architectures()
    cuda = importlib.import_module("torch").version.cuda
    built = building.build(wanted, cuda=cuda, jobs=jobs, timeout_seconds=timeout)
    click.echo(f"{click.format_filename(built.module)}: {built.description}")


@main.command(**_settings("neox-kernels status", "neox-kernels status --dtype float32"))
@click.option(
    "--dtype", type=click.Choice([*_DTYPES]), default="bfloat16", help="Dtype used to test the operators."
)
def status(dtype: str) -> None:
    """List the builds, and whether each operator works, with its speed."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    for built in building.list_built():
        click.echo(f"{click.format_filename(built.folder)}: {built.description}")
    state = importlib.import_module("neox_kernels.native").state(may_build=False)
    click.echo(click.format_filename(f"{state.reason[0].upper()}{state.reason[1:]}."))
    operators = importlib.import_module("neox_kernels.status")
    tested = getattr(importlib.import_module("torch"), _DTYPES[dtype])
    for operator in operators.OPERATORS:
        click.echo(f"{operator.name:24}{operators.describe(operator, tested)}")
