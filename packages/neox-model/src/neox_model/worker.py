"""What every worker program does first and last: who it is, what is asked, and how it tells of a failure.

torch and deepspeed take seconds to import. The program's own module, which imports them, is therefore
loaded by name once this worker is registered: the launcher can end it, and hears of it, from the first
moment on.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import click

from neox_data.errors import DataError
from neox_launcher.config import Resolved, decode_resolved, load_config, resolve
from neox_launcher.errors import ConfigError, NeoXError
from neox_launcher.log import configure_logging
from neox_launcher.ranks import RankInfo, read_rank, refuse_mpi_by_hand
from neox_launcher.stop_signals import block_warning, unblock_warning
from neox_launcher.worker import register_worker, report_failure

__all__ = ["exit_worker", "request_options", "run_worker", "show"]


def request_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what to do: `--resolved` from the launcher, `--config` and `--set` by hand."""
    for option in (
        click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Set one parameter."),
        click.option(
            "--config",
            "paths",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A configuration file; several are merged.",
        ),
        click.option(
            "--resolved",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            callback=lambda context, parameter, path: path and path.read_text(),
            help="A file with the resolved configuration, as the launcher encodes it.",
        ),
    ):
        command = option(command)
    return command


def run_worker(
    program: str,
    *,
    resolved: str | None,
    paths: Sequence[Path],
    overrides: Sequence[str],
    saves_when_warned: bool = False,
) -> int:
    """Run `module:function` with the resolved configuration.

    Args:
        program: where the work is done; the function takes a `Resolved` and returns what rank 0
            prints as the result, or None.
        resolved: encoded, from the launcher; None: the next two say it.
        paths: configuration files.
        overrides: `name=value`, stronger than the files.
        saves_when_warned: the program handles SIGUSR1, a scheduler's warning, and unblocks it once it can;
            other programs have nothing to save, so it ends them.

    Returns:
        The exit code: 0, or that of the failure, which has then been reported.
    """
    (block_warning if saves_when_warned else unblock_warning)()
    me = read_rank() or RankInfo(
        rank=0, local_rank=0, world_size=1, local_world_size=1, master_addr="127.0.0.1", master_port=29500
    )
    register_worker(me.rank)
    configure_logging(me.rank)
    # Importing deepspeed warns where there is no GPU; which backend runs, and why, is a line of our own.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator" not in record.getMessage())
    try:
        request = _read_request(me, resolved, paths, overrides)
        result = _call(program, request)
    except Exception as error:
        return report_failure(me.rank, error)
    if me.rank == 0 and result is not None:
        show(result)
    return 0


def show(text: str) -> None:
    """Print on standard output; when its reader has gone (`| head`), the work goes on unseen."""
    try:
        click.echo(text)
    except BrokenPipeError:
        # What is still buffered must go somewhere: Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_worker(code: int) -> NoReturn:
    """Leave the process.

    After a failure without clean-up: a process group that was abandoned half-way may wait for ever.
    """
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)


def _read_request(
    me: RankInfo, resolved: str | None, paths: Sequence[Path], overrides: Sequence[str]
) -> Resolved:
    if resolved is not None:
        return decode_resolved(resolved)
    if not paths:
        raise ConfigError("nothing says what to do: give at least one --config FILE")
    refuse_mpi_by_hand()
    hosts = me.world_size // me.local_world_size
    return resolve(load_config(paths, overrides=overrides), devices=me.world_size, hosts=hosts)


def _call(program: str, request: Resolved) -> str | None:
    """Import the program and call it; errors that data and kernels foresee are told by their message alone.

    Raises:
        NeoXError: with that message; a fused operator that cannot be used here is a wrong request.
    """
    module, _, name = program.partition(":")
    function: Callable[[Resolved], str | None] = getattr(importlib.import_module(module), name)
    kernels = importlib.import_module("neox_kernels.errors")
    try:
        return function(request)
    except kernels.KernelUnavailable as error:
        raise ConfigError(str(error)) from error
    except (DataError, kernels.KernelError) as error:
        raise NeoXError(str(error)) from error
