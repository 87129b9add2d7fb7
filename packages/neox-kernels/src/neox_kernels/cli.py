"""The command `neox-kernels`: compile the fused operators, or show their status.

Commands import what they use, because torch takes seconds to import.
"""

import errno
import importlib
import logging
import os
import sys
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
_INTERRUPTED = 130
# Why a standard output cannot be written to; other errors are not about it.
_OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_EXIT_CODES = (
    ("0", "success"),
    ("1", "failure"),
    ("2", "invalid request"),
    (str(_INTERRUPTED), "interrupted by Ctrl-C"),
)


class _Command(click.Command):
    """A command whose help has examples and exit codes, and whose errors are one sentence.

    Args:
        examples: complete command lines.
    """

    def __init__(self, *args: Any, examples: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **{"context_settings": _SETTINGS, **kwargs})
        self.examples = examples

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; a standard output that cannot be written to, such as a full disk, is reported."""
        # A closed one (`>&-`) is a file that cannot be written to, too.
        sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.filename is not None or error.errno not in _OUTPUT_LOST:
                raise
            sys.stderr.write(f"standard output cannot be written to: {error.strerror}\n")
            # Python would try to write the rest again when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KernelError as error:
            raise click.ClickException(str(error)) from error
        except (KeyboardInterrupt, click.Abort):
            click.echo("\ninterrupted", err=True)
            ctx.exit(_INTERRUPTED)

    def get_short_help_str(self, limit: int = 1_000) -> str:
        """Return the first sentence of the help, which click would cut to one line."""
        return super().get_short_help_str(1_000)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples and the exit codes."""
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in self.examples))
        with formatter.section("Exit codes"):
            formatter.write_dl(_EXIT_CODES)


class _Commands(_Command, click.Group):
    command_class = _Command


@click.group(cls=_Commands, examples=("neox-kernels build", "neox-kernels status"))
@click.version_option(package_name="neox-kernels")
def main() -> None:
    """Compile the fused operators, or show their status."""


@main.command(examples=("neox-kernels build", "neox-kernels build --arch sm_80 --arch sm_90 --jobs 8"))
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
    """Compile the operators for the GPUs of this machine, or for the given architectures."""
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s")
    wanted = architectures or importlib.import_module("neox_kernels.native").present_architectures()
    cuda = importlib.import_module("torch").version.cuda
    built = building.build(wanted, cuda=cuda, jobs=jobs, timeout_seconds=timeout)
    click.echo(f"{click.format_filename(built.module)}: {built.description}")


@main.command(examples=("neox-kernels status", "neox-kernels status --dtype float32"))
@click.option(
    "--dtype", type=click.Choice([*_DTYPES]), default="bfloat16", help="Dtype used to test the operators."
)
def status(dtype: str) -> None:
    """List the builds, and availability, correctness and speed of each operator."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    for built in building.list_built():
        click.echo(f"{click.format_filename(built.folder)}: {built.description}")
    state = importlib.import_module("neox_kernels.native").state(may_build=False)
    click.echo(click.format_filename(f"{state.reason[0].upper()}{state.reason[1:]}."))
    operators = importlib.import_module("neox_kernels.status")
    tested = getattr(importlib.import_module("torch"), _DTYPES[dtype])
    for operator in operators.OPERATORS:
        click.echo(f"{operator.name:24}{operators.describe(operator, tested)}")
