"""The worker processes of one host: starts, monitors, inspects and ends them."""

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from neox_launcher.protocol.exit_codes import as_exit_code
from neox_launcher.protocol.outcome import HEAD_START_SECONDS, Failure
from neox_launcher.protocol.stop_signals import WARNING_SIGNAL, warning_blocked
from neox_launcher.worker.reporting import RUN_DIR_VARIABLE, STOP_FILE, is_status, worker_file, write_aside

__all__ = ["Workers"]

_QUIET_SECONDS = 0.3
_DUMP_SECONDS = 4.0


class Workers:
    """The worker processes of one host.

    Args:
        folder: folder in which they report; see `neox_launcher.worker.reporting`.
        host: host name for reports.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}
        self._silent: dict[int, float] = {}
        self._is_killing = False
        self._stop_by: float | None = None
        self._interrupted: dict[int, str] = {}
        self.overran: list[int] = []
        """Ranks that were killed because they took too long to stop."""

    def start(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        directory: str,
        *,
        keep_open: Mapping[int, Collection[int]],
    ) -> None:
        """Start a worker for each rank, each in a separate session.

        Args:
            command: command of every worker.
            environments: for each rank all variables of its worker.
            directory: working directory of the workers.
            keep_open: rank -> file descriptors that its worker inherits.

        Raises:
            OSError: a worker cannot be started.
        """
        # The warning stays pending in a worker until it unblocks it.
        with warning_blocked():
            for rank, environment in environments.items():
                self._processes[rank] = subprocess.Popen(
                    command,
                    env={**environment, RUN_DIR_VARIABLE: str(self._folder)},
                    cwd=directory,
                    start_new_session=True,
                    pass_fds=keep_open.get(rank, ()),
                )

    @property
    def has_ended(self) -> bool:
        """Whether all workers have ended."""
        return all(self._code_of(rank) is not None for rank in self._processes)

    @property
    def in_trouble(self) -> bool:
        """Whether a worker has failed without having been killed by this agent."""
        return bool(self._silent) or any(
            worker_file(self._folder, rank, "error.json").exists() for rank in self._processes
        )

    def watch(self) -> None:
        """Check every worker once; to be called several times a second."""
        self._note_deaths()
        is_overdue = self._stop_by is not None and time.monotonic() > self._stop_by
        if is_overdue and not self._is_killing:
            self.overran = [rank for rank in self._processes if self._code_of(rank) is None]
            self.kill()

    def stop(self, number: int, *, within: float) -> None:
        """Ask the workers to save and exit.

        Args:
            number: signal that requested the stop. SIGUSR1 is forwarded unchanged: workers may already have
                received it from the scheduler, accept it any number of times, and keep it pending while they
                load. Any other signal is forwarded as SIGTERM, which ends workers that are still loading.
            within: seconds after which workers that still run are killed.
        """
        self._stop_by = time.monotonic() + within
        with suppress(OSError):  # On a full disk, workers report the signal that they receive.
            write_aside(self._folder / STOP_FILE, str(number))
        for rank in self._processes:
            self._signal(rank, WARNING_SIGNAL if number == WARNING_SIGNAL else signal.SIGTERM)

    def interrupt(self, rank: int) -> bool:
        """Send SIGINT to a worker in an operation that it may interrupt, once per operation.

        Returns:
            Whether the signal was sent; see `neox_launcher.worker.reporting.interruptible`.
        """
        try:
            operation = worker_file(self._folder, rank, "interruptible").read_text()
        except FileNotFoundError:
            return False
        if operation == self._interrupted.get(rank):
            return False
        self._interrupted[rank] = operation
        self._signal(rank, signal.SIGINT)
        return True

    def kill(self) -> None:
        """Kill the workers and all processes that they have started, including those of ended workers."""
        if not self._is_killing:
            self._note_deaths()
            self._is_killing = True
        for rank, process in self._processes.items():
            # Not waited for yet, so its process id cannot have been reused.
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if rank in self._codes:
                    process.wait()

    def failures(self) -> list[Failure]:
        """Return the failures of the workers; to be called after all have ended."""
        self._note_deaths()
        paths = [worker_file(self._folder, rank, "error.json") for rank in self._processes]
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
        unreported = [
            Failure(
                rank=rank,
                host=self._host,
                time=when - HEAD_START_SECONDS,
                message=_death_in_words(self._codes[rank]),
                exit_code=as_exit_code(self._codes[rank]) or 1,
                unreported=True,
            )
            for rank, when in self._silent.items()
        ]
        return [*(Failure(**report) for report in reports), *unreported]

    def progress(self) -> dict[int, tuple[int, float]]:
        """Return for each rank the last reported iteration, and its time in seconds since 1970."""
        reported = {}
        for rank in self._processes:
            path = worker_file(self._folder, rank, "progress")
            with suppress(OSError, ValueError):
                reported[rank] = (int(path.read_text()), path.stat().st_mtime)
        return reported

    def status(self) -> dict[str, Any]:
        """Return the status that rank 0 reports; empty if it is on another host, or has reported none."""
        path = worker_file(self._folder, 0, "status")
        # A file that is being written may hold parts of two reports.
        with suppress(OSError, ValueError):
            if 0 in self._processes and path.exists():
                found = json.loads(path.read_text())
                return found if isinstance(found, dict) and is_status(found) else {}
        return {}

    def facts(self) -> dict[int, Any]:
        """Return for each rank the facts that its worker has reported."""
        paths = {rank: worker_file(self._folder, rank, "facts") for rank in self._processes}
        return {
            rank: json.loads(path.read_text(encoding="utf-8"))
            for rank, path in paths.items()
            if path.exists()
        }

    def ask(self) -> None:
        """Request the stacks and collectives of every worker."""
        for rank in self._processes:
            # A worker handles SIGUSR2 only after it has registered; before, the signal would end it.
            if not worker_file(self._folder, rank, "pid").exists():
                continue
            os.truncate(worker_file(self._folder, rank, "stacks"), 0)
            self._signal(rank, signal.SIGUSR2)
            _write_question(worker_file(self._folder, rank, "question"))

    def answers(self) -> dict[int, dict[str, str]]:
        """Return for each rank its stacks and its answer to `ask`, waiting a few seconds for them.

        The entry `process` is the state of the process as in /proc, and its id.
        """
        deadline = time.monotonic() + _DUMP_SECONDS
        seen: dict[int, dict[str, str]] = {}
        while time.monotonic() < deadline:
            before, seen = seen, {rank: self._answer_of(rank) for rank in self._processes}
            if seen == before and all(all(answer.values()) for answer in seen.values()):
                break
            time.sleep(_QUIET_SECONDS)
        for rank, process in self._processes.items():
            seen[rank]["process"] = _state_of(process.pid)
        return seen

    def _answer_of(self, rank: int) -> dict[str, str]:
        paths = {name: worker_file(self._folder, rank, name) for name in ("stacks", "answer")}
        return {
            name: path.read_text(errors="replace") if path.exists() else "" for name, path in paths.items()
        }

    def _code_of(self, rank: int) -> int | None:
        """Return the exit code of a worker, negative for a signal; None if it is running.

        The process is not waited for, so that its id remains the id of the process group of its children.
        """
        if rank not in self._codes:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, self._processes[rank].pid, options)
            if ended is None:
                return None
            has_exited = ended.si_code == os.CLD_EXITED
            self._codes[rank] = ended.si_status if has_exited else -ended.si_status
        return self._codes[rank]

    def _signal(self, rank: int, number: int) -> None:
        if self._code_of(rank) is None:
            os.kill(self._processes[rank].pid, number)

    def _note_deaths(self) -> None:
        """Record when workers ended without a report; a worker that raises an error writes `error.json`."""
        if self._is_killing:
            return
        for rank in self._processes:
            # Before looking for the report, because a worker reports before it ends.
            code = self._code_of(rank)
            names = ("error.json",) if code else ("error.json", "end")
            has_reported = any(worker_file(self._folder, rank, name).exists() for name in names)
            if rank not in self._silent and code is not None and not has_reported:
                self._silent[rank] = time.time()


def _state_of(pid: int) -> str:
    """Return the state of a process and its id, such as `T 1234`; empty if the system does not provide it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    # The name of the program, in parentheses, may contain anything.
    return f"{text.rpartition(')')[2].split()[0]} {pid}"


def _write_question(path: Path) -> None:
    """Wake the answering thread of a worker, if it has one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO):
            return
        raise
    try:
        os.write(descriptor, b"?")
    finally:
        os.close(descriptor)


def _death_in_words(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed by SIGKILL; the host may have run out of memory (check its kernel log)"
    if code < 0:
        return f"terminated by {signal.Signals(-code).name}"
    if code == 0:
        return "exited with code 0 before the end of its program"
    return f"exited with code {code} without reporting an error"
