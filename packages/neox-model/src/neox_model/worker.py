"""The entry point of every worker program: register, read the request, run, and report failures.

torch and deepspeed take seconds to import. The program's module, which imports them, is therefore loaded by
name after this worker is registered, so that the launcher can already monitor and end it.
"""

import atexit
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from neox_config import Resolved, decode_resolved, load_config, resolve
from neox_config.errors import ConfigError, NeoXError
from neox_config.limits import allow_more_files
from neox_config.log import configure_logging
from neox_config.problems import list_problems
from neox_data.errors import DataError
from neox_kernels.errors import KernelError, KernelUnavailable
from neox_launcher.plan.epochs import config_for
from neox_launcher.plan.in_use import refuse_what_is_in_use
from neox_launcher.plan.notes import notes_on_data, unused_by_hand
from neox_launcher.plan.preflight import refuse_worker_by_hand
from neox_launcher.protocol.stop_signals import block_warning, unblock_warning
from neox_launcher.worker.ranks import RankInfo, read_rank, refuse_mpi_by_hand
from neox_launcher.worker.reporting import RUN_DIR_VARIABLE, register_worker, report_failure
from neox_model.errors import StopRequested

__all__ = ["exit_worker", "our_errors", "run_worker", "show", "worker_command"]

logger = logging.getLogger(__name__)

# Python's exit code if standard output cannot be flushed at the end.
_OUTPUT_LOST = 120


def worker_command(program: str, about: str, **options: Any) -> click.Command:
    """Return the command of a worker, which runs `module:function` and exits.

    Its options are those of a request: `--resolved` from the launcher, `--config` and `--set` by hand.

    Args:
        program: `module:function`, see `run_worker`.
        about: the help text.
        options: other arguments of `run_worker`.
    """

    @click.command(help=about)
    @click.option(
        "--resolved",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        callback=lambda context, parameter, path: path and path.read_text(),
        help="File with the resolved configuration, written by the launcher.",
    )
    @click.option(
        "--config",
        "paths",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Configuration file. May be repeated; the files are merged.",
    )
    @click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="NAME=VALUE",
        help="Override a parameter of the configuration. May be repeated; the last value wins.",
    )
    def main(resolved: str | None, paths: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
        exit_worker(run_worker(program, resolved=resolved, paths=paths, overrides=overrides, **options))

    return main


def run_worker(
    program: str,
    *,
    resolved: str | None,
    paths: Sequence[Path],
    overrides: Sequence[str],
    preflight: str | None = None,
    joins: bool = True,
    saves_when_warned: bool = False,
) -> int:
    """Run `module:function` with the resolved configuration.

    Args:
        program: `module:function`; the function takes process groups and a `Resolved`, and returns the
            result that rank 0 prints, or None.
        resolved: the resolved configuration, encoded by the launcher; None: use `paths` and `overrides`.
        paths: configuration files.
        overrides: `name=value` pairs that override the files.
        preflight: program (train, generate, serve or evaluate) whose preflight checks a worker by hand runs,
            as neox-launch does; None runs none.
        joins: the process group is joined before, and left after a success; False: the function takes only a
            `Resolved`.
        saves_when_warned: the program handles SIGUSR1, a scheduler's warning, and unblocks it once it can.
            SIGUSR1 ends other programs, which have nothing to save.

    Returns:
        The exit code: 0, or that of the failure, which has been reported.
    """
    (block_warning if saves_when_warned else unblock_warning)()
    me = read_rank() or RankInfo(
        rank=0, local_rank=0, world_size=1, local_world_size=1, master_addr="127.0.0.1", master_port=29500
    )
    register_worker(me.rank)
    allow_more_files()
    configure_logging(me.rank)
    try:
        request = _read_request(me, resolved, paths, overrides, preflight)
        run = _import(program)
        with our_errors():
            if joins:
                processes = importlib.import_module("neox_model.processes")
                groups = processes.join_processes(request.run.layout, request.config.engine)
                result = run(groups, request)
                processes.leave_processes()
            else:
                result = run(request)
        if me.rank == 0 and result is not None:
            show(str(result))
    except StopRequested as stop:
        # The launcher has printed the signal.
        level = logging.DEBUG if RUN_DIR_VARIABLE in os.environ else logging.WARNING
        logger.log(level, "%s: ending", stop)
        return stop.exit_code
    except UnicodeEncodeError as error:
        return report_failure(me.rank, ConfigError(f"{error}; write it in UTF-8, or set PYTHONUTF8=1"))
    except Exception as error:
        return report_failure(me.rank, error)
    return 0


def show(text: str, *, ends_line: bool = True) -> None:
    """Print to standard output; if its reader is gone (`| head`), continue without output.

    Args:
        text: what to print.
        ends_line: print a newline behind it.

    Raises:
        NeoXError: standard output cannot be written to for another reason, such as a full disk.
    """
    try:
        click.echo(text, nl=ends_line)
    except UnicodeEncodeError:
        # The locale's encoding lacks a character.
        encoding = sys.stdout.encoding
        click.echo(text.encode(encoding, errors="replace").decode(encoding), nl=ends_line)
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        _discard_output()
        raise NeoXError(f"the result cannot be written to standard output: {error.strerror}") from error


def _discard_output() -> None:
    # Python flushes the buffer again when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_worker(code: int) -> NoReturn:
    """Exit the process without finalizing the interpreter, as multiprocessing ends its processes.

    A thread of gloo that releases a tensor waits for the interpreter's lock. If that is finalized meanwhile,
    Python ends the thread inside C++ functions that no exception may leave, and the process aborts
    ("terminate called without an active exception") after a complete run. Process groups live as long as
    anything refers to them, also after `destroy_process_group`.

    After a success, all that Python does before the finalization is done: threads are waited for, and the
    functions registered with atexit are called. After a failure nothing is: an incomplete process group may
    block forever.

    Args:
        code: the exit code; if it is 0 and output is lost, that of Python for this case is used.

    Raises:
        SystemExit: after a success, so that what called this program, such as a profiler, can write its
            results.
    """
    if code:
        _flush_output()
        os._exit(code)
    # Called first; Python has waited for the threads before.
    atexit.register(_end_after_success)
    sys.exit(0)


def _end_after_success() -> NoReturn:
    atexit.unregister(_end_after_success)
    # A registered function that flushes would only print a traceback about output that is lost.
    was_written = _flush_output()
    atexit._run_exitfuncs()
    os._exit(0 if _flush_output() and was_written else _OUTPUT_LOST)


def _flush_output() -> bool:
    """Return whether all output could be written."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            # None: the descriptor was closed when the process started.
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            is_written = False
    return is_written


def _read_request(
    me: RankInfo,
    resolved: str | None,
    paths: Sequence[Path],
    overrides: Sequence[str],
    preflight: str | None,
) -> Resolved:
    if resolved is not None:
        return decode_resolved(resolved)
    if not paths:
        raise ConfigError("no configuration was given; pass at least one --config FILE")
    refuse_mpi_by_hand()
    hosts = me.world_size // me.local_world_size
    config = load_config(paths, overrides=overrides)
    config = config_for(preflight, config, devices=me.world_size, hosts=hosts)
    request = resolve(config, devices=me.world_size, hosts=hosts)
    if preflight is not None:
        notices = [*config.notices, *notes_on_data(config)]
        notices += unused_by_hand(config) if me.world_size == 1 else ()
        if me.rank == 0 and notices:
            click.echo(list_problems(notices, config.files, called="note") + "\n", err=True)
        refuse_worker_by_hand(config, program=preflight)
        # Of several ranks, all notice together later; if one ended here, the others would wait for it.
        if me.world_size == 1:
            refuse_what_is_in_use(config, program=preflight, is_local=True)
    return request


def _import(program: str) -> Callable[..., Any]:
    module, _, name = program.partition(":")
    if "torch" not in sys.modules:
        # Nothing else is printed until this is done, which takes up to a minute with a slow disk.
        logger.info("importing torch")
    # A search for garbage takes an eighth of the time of imports and finds hardly any.
    gc.disable()
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    finally:
        gc.enable()
    return function


@contextmanager
def our_errors() -> Iterator[None]:
    """Convert the errors of the data and kernel packages that the block raises.

    Raises:
        NeoXError: an error of the data or kernel package.
        ConfigError: a requested fused operator cannot be used.
    """
    try:
        yield
    except KernelUnavailable as error:
        raise ConfigError(str(error)) from error
    except (DataError, KernelError) as error:
        raise NeoXError(str(error)) from error
