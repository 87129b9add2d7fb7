"""What a worker tells its node: that it lives, how far it is, that it ended by itself, and why it failed.

The node hands every worker the path of a private folder in NEOX_RUN_DIR. A worker writes `rank-R.pid` there
when it starts, `rank-R.error.json` when it fails and `rank-R.end` when its interpreter ends in any orderly
way; all appear whole or not at all. A process that is gone without the last was killed or crashed. On
SIGUSR2 it writes its Python stacks to `rank-R.stacks`, whatever it is waiting for. Without the variable (a
worker started by hand) nothing is written, and errors go to stderr alone.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neox_launcher.errors import NeoXError

__all__ = [
    "AGENT_FILE",
    "ALL_DONE",
    "EXIT_CODES_FILE",
    "NODE_FILE",
    "RESTART_VARIABLE",
    "RUN_DIR_VARIABLE",
    "STOP_FILE",
    "Progress",
    "answer_questions",
    "die_with_parent",
    "is_restart",
    "register_worker",
    "report_facts",
    "report_failure",
    "requested_signal",
    "worker_file",
    "write_aside",
]

RUN_DIR_VARIABLE = "NEOX_RUN_DIR"
RESTART_VARIABLE = "NEOX_RESTART"
"""Set for the workers of a launch that begins again after a failure, to how often it has."""
EXIT_CODES_FILE = "exit_codes.json"
AGENT_FILE = "agent.pid"
NODE_FILE = "node.pid"
STOP_FILE = "stop-signal"
"""The number of the signal that the launcher was asked to stop by, which may reach workers as another."""
ALL_DONE = -1
"""Instead of an iteration: what follows is no iteration, and may take long."""
_BEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1

_logger = logging.getLogger(__name__)


def worker_file(folder: Path, rank: int, name: str) -> Path:
    """Where a worker and its node leave each other something: pid, end, error.json, stacks, progress ..."""
    return folder / f"rank-{rank}.{name}"


def is_restart() -> bool:
    """Whether the launch that this worker belongs to has failed before and begun again."""
    return RESTART_VARIABLE in os.environ


def register_worker(rank: int) -> None:
    """Announce this process to its node, and ask the kernel to end it when its parent dies."""
    folder = _run_dir()
    die_with_parent(None if folder is None else _agent_of(folder))
    if folder is None:
        return
    announced = worker_file(folder, rank, "pid")
    if announced.exists() and announced.read_text() == str(os.getpid()):
        return
    # Kept open by the handler, which writes to it without Python's help.
    stacks = worker_file(folder, rank, "stacks").open("ab", buffering=0)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    write_aside(announced, str(os.getpid()))
    atexit.register(_report_end, worker_file(folder, rank, "end"), os.getpid())


class Progress:
    """Tells this worker's node how far it is, at the price of one system call.

    Args:
        rank: this worker's.
    """

    def __init__(self, rank: int) -> None:
        folder = _run_dir()
        self._file = None if folder is None else worker_file(folder, rank, "progress").open("wb", buffering=0)

    def tell(self, iteration: int) -> None:
        """This iteration is done; `ALL_DONE` says that none will follow."""
        if self._file is not None:
            os.pwrite(self._file.fileno(), b"%20d" % iteration, 0)

    @contextmanager
    def kept_up(self, iteration: int) -> Iterator[None]:
        """Within, this worker tells every second that it is alive: what it does may take long.

        Args:
            iteration: the last that is done.
        """
        has_ended = threading.Event()

        def beat() -> None:
            while not has_ended.wait(_BEAT_SECONDS):
                self.tell(iteration)

        heart = threading.Thread(target=beat, daemon=True)
        heart.start()
        try:
            yield
        finally:
            has_ended.set()
            heart.join()
            self.tell(iteration)


def answer_questions(rank: int, describe: Callable[[], str]) -> None:
    """Let this worker's node ask, at any time, what it is waiting for; a thread of its own answers.

    Args:
        rank: this worker's.
        describe: gives the answer; called in that thread while the worker may be stuck in any other.
    """
    folder = _run_dir()
    if folder is None:
        return
    question = worker_file(folder, rank, "question")
    os.mkfifo(question, mode=0o600)
    answer = worker_file(folder, rank, "answer")
    threading.Thread(target=_answer, args=(question, answer, describe), daemon=True).start()


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
    write_aside(worker_file(folder, rank, "error.json"), json.dumps(report))
    return exit_code


def report_facts(rank: int, facts: Mapping[str, Any]) -> None:
    """Leave something for whoever started this launch; the last report of a rank counts.

    Args:
        rank: this worker's.
        facts: values JSON can carry.
    """
    folder = _run_dir()
    if folder is not None:
        write_aside(worker_file(folder, rank, "facts"), json.dumps(facts))


def requested_signal(received: int) -> signal.Signals:
    """The signal that asked for a stop: the launcher's where it passed one on, else the one received."""
    folder = _run_dir()
    path = None if folder is None else folder / STOP_FILE
    return signal.Signals(int(path.read_text()) if path is not None and path.exists() else received)


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
    """Write a file that the user alone can read, so that it appears whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.touch(mode=0o600)
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _run_dir() -> Path | None:
    folder = os.environ.get(RUN_DIR_VARIABLE)
    return Path(folder) if folder else None


def _agent_of(folder: Path) -> int | None:
    """The process that starts the workers, as it wrote itself down."""
    path = folder / AGENT_FILE
    return int(path.read_text()) if path.exists() else None


def _answer(question: Path, answer: Path, describe: Callable[[], str]) -> None:
    # Open for writing, too: so the pipe does not end after the first question.
    descriptor = os.open(question, os.O_RDWR)
    while os.read(descriptor, 1):
        write_aside(answer, describe())


def _report_end(path: Path, pid: int) -> None:
    # A process forked from the worker runs this too, but is not the worker. The launcher may be gone.
    if os.getpid() == pid and path.parent.is_dir():
        write_aside(path, "")
