"""What a worker tells the launcher: that it lives, that it ended by itself, and why it failed.

The launcher hands every worker the path of a private folder in NEOX_RUN_DIR. A worker writes `rank-R.pid`
there when it starts, `rank-R.error.json` when it fails and `rank-R.end` when its interpreter ends in any
orderly way; all appear whole or not at all. A process that is gone without the last was killed or crashed.
Without the variable (a worker started by hand) nothing is written, and errors go to stderr alone.
"""

import atexit
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from neox_launcher.errors import NeoXError

__all__ = [
    "AGENT_FILE",
    "EXIT_CODES_FILE",
    "RUN_DIR_VARIABLE",
    "die_with_parent",
    "register_worker",
    "report_failure",
    "write_aside",
]

RUN_DIR_VARIABLE = "NEOX_RUN_DIR"
EXIT_CODES_FILE = "exit_codes.json"
AGENT_FILE = "agent.pid"
_PR_SET_PDEATHSIG = 1

_logger = logging.getLogger(__name__)


def register_worker(rank: int) -> None:
    """Announce this process to the launcher, and ask the kernel to end it when its parent dies."""
    folder = _run_dir()
    die_with_parent(None if folder is None else _agent_of(folder))
    if folder is not None:
        write_aside(folder / f"rank-{rank}.pid", f"{os.getpid()}\n")
        atexit.register(_report_end, folder / f"rank-{rank}.end", os.getpid())


def report_failure(rank: int, error: BaseException) -> int:
    """Tell the launcher why this worker ends; to be called where the error is caught.

    A `NeoXError` is reported by its message, anything else with its traceback.

    Returns:
        The exit code to leave with: 2 for a wrong request, else 1.
    """
    if isinstance(error, NeoXError):
        exit_code, trace, message = error.exit_code, None, str(error)
    else:
        exit_code, trace = 1, "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
    folder = _run_dir()
    if folder is None:
        sys.stderr.write((trace or f"error: {message}").rstrip() + "\n")
        return exit_code
    report = {
        "time": time.time(),
        "host": socket.gethostname(),
        "rank": rank,
        "message": message,
        "traceback": trace,
        "exit_code": exit_code,
    }
    write_aside(folder / f"rank-{rank}.error.json", json.dumps(report))
    return exit_code


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, and do it now if the parent is gone.

    Linux only; elsewhere a worker outlives a launcher that is killed with SIGKILL.

    Args:
        parent: who started this process, where that is known; None takes the present parent.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _logger.warning("cannot tie this process to its parent: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        # It died before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


def write_aside(path: Path, text: str) -> None:
    """Write a file so that it appears whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _run_dir() -> Path | None:
    folder = os.environ.get(RUN_DIR_VARIABLE)
    return Path(folder) if folder else None


def _agent_of(folder: Path) -> int | None:
    """The process that starts the workers, as it wrote itself down."""
    path = folder / AGENT_FILE
    return int(path.read_text()) if path.exists() else None


def _report_end(path: Path, pid: int) -> None:
    # A process forked from the worker runs this too, but is not the worker. The launcher may be gone.
    if os.getpid() == pid and path.parent.is_dir():
        write_aside(path, "")
