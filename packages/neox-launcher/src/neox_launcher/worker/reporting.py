"""Reports of a worker to its agent: start, progress, failure and regular end.

The agent passes the path of a private folder in NEOX_RUN_DIR. A worker writes `rank-R.pid` there when it
starts, `rank-R.error.json` when it fails and `rank-R.end` when its interpreter exits normally; all are
written atomically. A process that ends without the last was killed or crashed. On SIGUSR2 a worker writes its
Python stacks to `rank-R.stacks`, even while it is blocked. Without the variable (a worker started by hand)
nothing is written, and errors go to stderr only.
"""

import atexit
import ctypes
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from neox_config import finite_json
from neox_config.atomic import atomic_write
from neox_config.errors import NeoXError
from neox_config.limits import limit_reached
from neox_launcher.protocol.outcome import HEAD_START_SECONDS
from neox_launcher.protocol.run_folder import no_room

__all__ = [
    "AGENT_FILE",
    "ALL_DONE",
    "FINISHING",
    "LAUNCH_VARIABLE",
    "RESTART_VARIABLE",
    "RUN_DIR_VARIABLE",
    "STOP_FILE",
    "Progress",
    "answer_questions",
    "die_with_parent",
    "interruptible",
    "is_restart",
    "is_status",
    "launch_name",
    "register_worker",
    "report_facts",
    "report_failure",
    "requested_signal",
    "start_of",
    "worker_file",
    "write_aside",
]

RUN_DIR_VARIABLE = "NEOX_RUN_DIR"
RESTART_VARIABLE = "NEOX_RESTART"
"""Set to the number of restarts for the workers of a restarted launch."""
LAUNCH_VARIABLE = "NEOX_LAUNCH"
"""Set to the name of the launch, the same for its restarts, which belong to one run."""
AGENT_FILE = "agent.pid"
STOP_FILE = "stop-signal"
"""File with the number of the signal that requested the stop, which may be forwarded as another one."""
ALL_DONE = -1
"""Reported instead of an iteration when no iterations follow, and what follows may take long."""
FINISHING = "finishing"
"""Phase after the last iteration, until the worker exits; other phases may lie in it."""
_BEAT_SECONDS = 1.0
_PROGRESS_BYTES = 20
_STATUS_BYTES = 2048
_PR_SET_PDEATHSIG = 1
_STANDARD_INPUT = 0

_logger = logging.getLogger(__name__)


def worker_file(folder: Path, rank: int, name: str) -> Path:
    """Return the path of a file shared by a worker and its agent: pid, end, error.json, stacks, ..."""
    return folder / f"rank-{rank}.{name}"


def is_restart() -> bool:
    """Return whether this worker belongs to a restarted launch."""
    return RESTART_VARIABLE in os.environ


def start_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the name of the launch and the number of its restart, from the workers' environment."""
    restart = int(environment.get(RESTART_VARIABLE, 0))
    return {"launch": environment.get(LAUNCH_VARIABLE), "restart": restart}


def launch_name() -> str | None:
    """Return the name of the launch that this worker belongs to; None without neox-launch."""
    return os.environ.get(LAUNCH_VARIABLE)


def register_worker(rank: int) -> None:
    """Register this process with its agent, and ask the kernel to kill it when its parent dies.

    Raises:
        NeoXError: the folder for temporary files is full.
    """
    folder = _run_dir()
    agent = None if folder is None else folder / AGENT_FILE
    die_with_parent(int(agent.read_text()) if agent is not None and agent.exists() else None)
    if folder is None:
        return
    announced, end, pid = worker_file(folder, rank, "pid"), worker_file(folder, rank, "end"), os.getpid()
    if announced.exists() and announced.read_text() == str(pid):
        return
    # The handler keeps the file open and writes to it without the interpreter.
    stacks = worker_file(folder, rank, "stacks").open("ab", buffering=0)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    try:
        write_aside(announced, str(pid))
    except OSError as error:
        raise NeoXError(no_room(error)) from error

    def report_end() -> None:
        # Processes forked from the worker also run this. The folder is gone if the launcher has ended.
        if os.getpid() == pid and end.parent.is_dir():
            # Unlike a new file, this requires no disk space.
            announced.rename(end)

    atexit.register(report_end)


class Progress:
    """Reports the progress of this worker to its agent, with one system call per report.

    Rank 0 also reports a status, which the launcher shows.

    Args:
        rank: rank of this worker.

    Raises:
        NeoXError: the folder for temporary files is full.
    """

    def __init__(self, rank: int) -> None:
        folder = _run_dir()
        self._file: BinaryIO | None = None
        self._status_file: BinaryIO | None = None
        self._status: dict[str, Any] = {}
        self._describing = threading.Lock()
        self.seconds_in_phases = 0.0
        """Time in contexts of `phase` so far, which is no training time."""
        if folder is not None:
            self._file = _open_reserved(worker_file(folder, rank, "progress"), _PROGRESS_BYTES)
        if folder is not None and rank == 0:
            self._status_file = _open_reserved(worker_file(folder, rank, "status"), _STATUS_BYTES)

    @property
    def is_shown(self) -> bool:
        """Whether the launcher shows the status of this worker."""
        return self._status_file is not None

    def report(self, iteration: int) -> None:
        """Report an iteration as completed; `ALL_DONE` means that no iterations follow."""
        if self._file is not None:
            descriptor = self._file.fileno()
            try:
                os.pwrite(descriptor, b"%*d" % (_PROGRESS_BYTES, iteration), 0)
            except OSError:
                # Some file systems require space to overwrite; the time alone is a sign of life.
                os.utime(descriptor)

    def describe(self, **changes: Any) -> None:
        """Change parts of the status.

        Args:
            changes: `phase`: what this worker is doing besides training, empty if it is training;
                `iteration`, `last_iteration`; `metrics` by name; `warnings`: their number. Metrics are added
                to earlier ones.
        """
        if self._status_file is None:
            return
        with self._describing:
            metrics = {**self._status.get("metrics", {}), **changes.get("metrics", {})}
            self._status = {**self._status, **changes, "metrics": metrics}
            text = finite_json.dumps(self._status).encode("ascii").ljust(_STATUS_BYTES)
            # On a full disk, an older status is shown.
            with suppress(OSError):
                os.pwrite(self._status_file.fileno(), text, 0)

    @contextmanager
    def phase(self, name: str, **changes: Any) -> Iterator[None]:
        """Report within the context that this worker is doing something besides training.

        Args:
            name: what it is doing.
            changes: other parts of the status that change with it, such as `iteration`.
        """
        before, started = self._status.get("phase", ""), time.monotonic()
        self.describe(phase=name, **changes)
        try:
            yield
        finally:
            self.seconds_in_phases += time.monotonic() - started
            self.describe(phase=before)

    @contextmanager
    def repeated(self, iteration: int) -> Iterator[None]:
        """Report progress every second within the context, for operations that may take long.

        Args:
            iteration: last completed iteration.
        """
        has_ended = threading.Event()

        def beat() -> None:
            while not has_ended.wait(_BEAT_SECONDS):
                self.report(iteration)

        heart = threading.Thread(target=beat, daemon=True)
        heart.start()
        try:
            yield
        finally:
            has_ended.set()
            heart.join()
            self.report(iteration)


def is_status(found: dict[str, Any]) -> bool:
    """Return whether JSON is a whole status as `Progress.describe` writes it, and can therefore be shown.

    Args:
        found: parsed without its numbers that are not finite.
    """
    try:
        status = finite_json.restored(found)
    except ValueError:
        return False
    metrics = status.get("metrics", {})
    numbers = [status.get(name, 0) for name in ("iteration", "last_iteration", "warnings")]
    return (
        isinstance(status.get("phase", ""), str)
        and all(type(number) is int for number in numbers)
        and isinstance(metrics, dict)
        and all(type(value) in (int, float) for value in metrics.values())
    )


def answer_questions(rank: int, describe: Callable[[], str]) -> None:
    """Start a thread that answers the agent's questions about what this worker is waiting for.

    Args:
        rank: rank of this worker.
        describe: returns the answer; called in the thread, while other threads may be blocked.
    """
    folder = _run_dir()
    if folder is None:
        return
    question = worker_file(folder, rank, "question")
    os.mkfifo(question, mode=0o600)

    def answer() -> None:
        # Also open for writing, so that the pipe does not end after the first question.
        descriptor = os.open(question, os.O_RDWR)
        while os.read(descriptor, 1):
            write_aside(worker_file(folder, rank, "answer"), describe())

    threading.Thread(target=answer, daemon=True).start()


def report_failure(rank: int, error: BaseException) -> int:
    """Report to the launcher why this worker fails; to be called where the error is caught.

    A `NeoXError` is reported by its message, any other exception with its traceback. If a limit of the system
    is the cause, the message names it, and there is no traceback.

    Returns:
        The exit code of the process: that of a `NeoXError`, else 1.
    """
    limit = limit_reached(error)
    if isinstance(error, NeoXError):
        exit_code, trace, message = error.exit_code, None, str(error)
    else:
        # The traceback module opens files, which fails at the limit of open files.
        trace = None if limit is not None else "".join(traceback.format_exception(error))
        exit_code, message = 1, ": ".join(filter(None, (type(error).__name__, str(error))))
    if limit is not None:
        # In place of a remedy for another cause.
        message = f"{message.rpartition('; ')[0] or message}: {limit}"
    folder = _run_dir()
    if folder is None:
        sys.stderr.write((trace or f"error: {message}").rstrip() + "\n")
        return exit_code
    if limit is not None:
        # The report may require the last descriptor; nothing is read any more.
        with suppress(OSError):
            os.close(_STANDARD_INPUT)
    report = {
        # The rank that failed is the first, though the others may hear of it and report it earlier.
        "time": time.time() + (HEAD_START_SECONDS if getattr(error, "is_of_another_rank", False) else 0.0),
        "host": socket.gethostname(),
        "rank": rank,
        "message": message,
        "traceback": trace,
        "exit_code": exit_code,
        "is_refused_start": isinstance(error, NeoXError) and error.is_refused_start,
    }
    try:
        write_aside(worker_file(folder, rank, "error.json"), json.dumps(report, allow_nan=False))
    except OSError:  # The disk is full. The agent keeps the last output of its workers.
        sys.stderr.write(f"{trace or message}\n")
    return exit_code


def report_facts(rank: int, facts: Mapping[str, Any]) -> None:
    """Report results to the launcher; a later report of the same rank replaces an earlier one.

    Args:
        rank: rank of this worker.
        facts: JSON-serializable values.
    """
    folder = _run_dir()
    if folder is not None:
        write_aside(worker_file(folder, rank, "facts"), json.dumps(facts, allow_nan=False))


@contextmanager
def interruptible(rank: int, number: int) -> Iterator[None]:
    """Let the first Ctrl-C within the context reach this worker as SIGINT, instead of stopping the job.

    Args:
        rank: rank of this worker.
        number: number of the operation in the context, different for each.
    """
    folder = _run_dir()
    if folder is None:
        yield
        return
    announced = worker_file(folder, rank, "interruptible")
    with suppress(OSError):  # On a full disk, Ctrl-C stops the job.
        write_aside(announced, str(number))
    try:
        yield
    finally:
        announced.unlink(missing_ok=True)


def requested_signal(received: int) -> signal.Signals:
    """Return the signal that requested the stop: the one recorded by the agent, else the one received."""
    folder = _run_dir()
    path = None if folder is None else folder / STOP_FILE
    return signal.Signals(int(path.read_text()) if path is not None and path.exists() else received)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies; kill it now if the parent is already gone.

    Linux only; on other systems a worker continues if the launcher is killed with SIGKILL.

    Args:
        parent: process id of the expected parent; None for the current parent.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _logger.warning("cannot tie this process to its parent: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        # The parent died before the call to prctl.
        os.kill(os.getpid(), signal.SIGKILL)


def write_aside(path: Path, text: str) -> None:
    """Write a file atomically, readable only by the user."""
    with atomic_write(path, mode=0o600) as file:
        file.write(text)


def _open_reserved(path: Path, size: int) -> BinaryIO:
    try:
        file = path.open("w+b", buffering=0)
        os.pwrite(file.fileno(), b" " * size, 0)
    except OSError as error:
        raise NeoXError(no_room(error), code="not-writable") from error
    return file


def _run_dir() -> Path | None:
    folder = os.environ.get(RUN_DIR_VARIABLE)
    return Path(folder) if folder else None
