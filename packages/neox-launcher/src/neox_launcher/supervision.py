"""Keeping watch over a launch: signals, the first failure, and an end within seconds.

The agent (`neox_launcher.node`) and its workers run in a session of their own, so that Ctrl-C reaches the
launcher alone, which decides: once asks the workers to finish the iteration, save and leave; twice kills
everything. torch's agent would wait 30 seconds for the others when a worker dies; here they get two.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from neox_launcher.worker import EXIT_CODES_FILE, RUN_DIR_VARIABLE

__all__ = ["Failure", "Outcome", "supervise"]

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0
# A worker that vanished is noticed later than the complaints of those who talked to it.
_HEAD_START_SECONDS = 0.5
_SIGNALLED = 128
_ENDED_BY_AGENT = _SIGNALLED + signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one worker failed.

    Args:
        rank: which worker.
        host: where it ran.
        time: when, in seconds since 1970.
        message: what was wrong.
        traceback: None where the message is meant for the user.
        exit_code: the worker's.
    """

    rank: int
    host: str
    time: float
    message: str
    traceback: str | None
    exit_code: int

    def __str__(self) -> str:
        text = (self.traceback or self.message).rstrip()
        return f"worker {self.rank} on {self.host} failed:\n{text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended.

    Args:
        exit_code: what the launcher returns.
        first_failure: the one that the others followed from; None when nothing failed.
        num_failures: workers that failed by themselves.
    """

    exit_code: int
    first_failure: Failure | None = None
    num_failures: int = 0


def supervise(command: Sequence[str], environment: Mapping[str, str]) -> Outcome:
    """Run a command whose workers report to a private folder, until all have ended.

    Args:
        command: starts the workers and ends after them.
        environment: of the command; NEOX_RUN_DIR is added.
    """
    with tempfile.TemporaryDirectory(prefix="neox-") as folder:
        watch = _Watch(Path(folder))
        env = {**environment, RUN_DIR_VARIABLE: folder}
        with watch.listening(), subprocess.Popen(command, env=env, start_new_session=True) as agent:
            try:
                code = watch.until_ended(agent)
            finally:
                watch.kill_all(agent)
        return watch.outcome(code)


@dataclass(frozen=True, slots=True)
class _Process:
    """A worker's process: its number, and its start, because numbers are used again."""

    pid: int
    started: str | None

    @property
    def is_alive(self) -> bool:
        return self.started is not None and _start_of(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Watch:
    """What is known of the workers of one launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._signals: list[int] = []
        self._told = 0
        self._processes: dict[int, _Process] = {}
        self._vanished: dict[int, float] = {}
        self._failed_at: float | None = None
        self._is_killing = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Remember the signals that end a program instead of dying of them."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        # A lost connection counts as a request to stop, unless nohup says that it shall not.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._remember) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def until_ended(self, agent: subprocess.Popen[bytes]) -> int:
        """Pass signals on and end everyone after a failure, until the agent has ended; returns its code."""
        while agent.poll() is None:
            self._look_for_workers()
            self._pass_signals_on(agent)
            self._look_for_failures()
            if self._failed_at is not None and time.time() - self._failed_at > _GRACE_SECONDS:
                self._kill_workers()
            time.sleep(_POLL_SECONDS)
        return agent.returncode

    def kill_all(self, agent: subprocess.Popen[bytes]) -> None:
        """Leave nothing behind, workers that have not registered yet included."""
        if agent.poll() is None:
            children = _children_of(agent.pid)
            agent.kill()
            for process in children:
                process.send(signal.SIGKILL)
        self._kill_workers()

    def outcome(self, code: int) -> Outcome:
        """How it ended, from what the workers left in the folder."""
        failures = sorted(self._failures(), key=lambda failure: failure.time)
        if self._signals:
            # Workers that had nothing to save yet died of the signal; only what they report is a failure.
            failures = [failure for failure in failures if failure.rank not in self._vanished]
        # The agent ends the others by SIGTERM: who died of it did not fail first, nor by itself.
        by_themselves = [failure for failure in failures if failure.exit_code != _ENDED_BY_AGENT] or failures
        if by_themselves:
            first = by_themselves[0]
            return Outcome(exit_code=first.exit_code, first_failure=first, num_failures=len(by_themselves))
        if self._signals:
            return Outcome(exit_code=_SIGNALLED + self._signals[0])
        if code == 0:
            return Outcome(exit_code=0)
        failure = self._unreported(code)
        return Outcome(exit_code=failure.exit_code, first_failure=failure, num_failures=1)

    def _unreported(self, code: int) -> Failure:
        """A worker that failed before it could say anything, or the agent itself."""
        codes = self._exit_codes()
        rank = min(codes, default=0)
        message = _death_in_words(codes.get(rank, code)) + "; what it printed is above"
        exit_code = _as_exit_code(codes.get(rank, code))
        host = os.uname().nodename
        return Failure(
            rank=rank, host=host, time=time.time(), message=message, traceback=None, exit_code=exit_code
        )

    def _pass_signals_on(self, agent: subprocess.Popen[bytes]) -> None:
        if len(self._signals) <= self._told:
            return
        self._told = len(self._signals)
        if self._told > 1 or not self._processes:
            self.kill_all(agent)
            return
        with suppress(OSError):  # The terminal may be what went away.
            sys.stderr.write("\nstopping after this iteration; once more to stop at once\n")
            sys.stderr.flush()
        for process in self._processes.values():
            process.send(signal.SIGTERM)

    def _look_for_failures(self) -> None:
        if self._is_killing:
            return
        now = time.time()
        for rank, process in self._processes.items():
            # In this order: a worker reports before it ends.
            if rank not in self._vanished and not process.is_alive and not self._has_reported(rank):
                self._vanished[rank] = now
        if self._failed_at is None and (self._vanished or any(self._folder.glob("rank-*.error.json"))):
            self._failed_at = now

    def _has_reported(self, rank: int) -> bool:
        return any((self._folder / f"rank-{rank}.{ending}").exists() for ending in ("end", "error.json"))

    def _look_for_workers(self) -> None:
        for path in self._folder.glob("rank-*.pid"):
            rank = int(path.stem.partition("-")[2])
            if rank not in self._processes:
                pid = int(path.read_text())
                self._processes[rank] = _Process(pid, _start_of(pid))

    def _kill_workers(self) -> None:
        self._is_killing = True
        self._look_for_workers()
        for process in self._processes.values():
            process.send(signal.SIGKILL)

    def _failures(self) -> Iterator[Failure]:
        for path in self._folder.glob("rank-*.error.json"):
            yield Failure(**json.loads(path.read_text(encoding="utf-8")))
        codes = self._exit_codes()
        for rank, when in self._vanished.items():
            code = codes.get(rank, 1)
            yield Failure(
                rank=rank,
                host=os.uname().nodename,
                time=when - _HEAD_START_SECONDS,
                message=_death_in_words(code),
                traceback=None,
                exit_code=_as_exit_code(code),
            )

    def _exit_codes(self) -> dict[int, int]:
        path = self._folder / EXIT_CODES_FILE
        if not path.exists():
            return {}
        return {int(rank): int(code) for rank, code in json.loads(path.read_text()).items()}


def _as_exit_code(code: int) -> int:
    """A process's return code as a shell shows it."""
    return code if code >= 0 else _SIGNALLED - code


def _death_in_words(code: int) -> str:
    if code == -signal.SIGKILL:
        return "it was killed by SIGKILL; the host may have run out of memory (look into its kernel log)"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code} without saying why"


def _children_of(parent: int) -> list[_Process]:
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                pid = int(path.parent.name)
                children.append(_Process(pid, _start_of(pid)))
    return children


def _start_of(pid: int) -> str | None:
    """When a process started, in the kernel's clock; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
