"""The workers of one host, as their node sees them: started, watched, asked, and ended within seconds."""

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from neox_launcher.outcome import HEAD_START_SECONDS, Failure
from neox_launcher.processes import Process, as_exit_code, children_of
from neox_launcher.stop_signals import WARNING_SIGNAL, warning_blocked
from neox_launcher.worker import EXIT_CODES_FILE, RUN_DIR_VARIABLE, STOP_FILE, worker_file, write_aside

__all__ = ["Workers"]

_AGENT_SECONDS = 3.0
_QUIET_SECONDS = 0.3
_DUMP_SECONDS = 4.0


class Workers:
    """Watches over one command that starts workers, and over them.

    Args:
        folder: where they report; see `neox_launcher.worker`.
        ranks: those of this host.
        host: its name, for reports.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], host: str) -> None:
        self._folder, self._ranks, self._host = folder, tuple(ranks), host
        self._processes: dict[int, Process] = {}
        self._vanished: dict[int, float] = {}
        self._is_killing = False
        self._killed_at = 0.0
        self._stop_by: float | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self.overran: list[int] = []
        """Ranks that were killed because they took too long to stop."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        """Start the command that starts the workers.

        Raises:
            OSError: it cannot be started.
        """
        env = {**environment, RUN_DIR_VARIABLE: str(self._folder)}
        with warning_blocked():
            self._agent = subprocess.Popen(command, env=env, cwd=directory, start_new_session=True)

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended, and all workers with it."""
        return self._agent is not None and self._agent.poll() is not None

    @property
    def in_trouble(self) -> bool:
        """Whether a worker has failed by itself."""
        return bool(self._vanished) or any(
            worker_file(self._folder, rank, "error.json").exists() for rank in self._ranks
        )

    def watch(self) -> None:
        """Look at everything once; to be called several times a second."""
        self._look_for_workers()
        self._look_for_the_vanished()
        now = time.monotonic()
        if self._stop_by is not None and now > self._stop_by and not self._is_killing:
            self.overran = [rank for rank, process in self._processes.items() if process.is_alive]
            self.kill()
        if self._is_killing:
            self._kill_workers()
            if now - self._killed_at > _AGENT_SECONDS:
                self._kill_agent()

    def stop(self, number: int, *, within: float) -> None:
        """Ask the workers to save and leave; without any yet, there is nothing to save.

        Args:
            number: the signal that asked for it. Workers get SIGUSR1 as such, since they may have had it from
                the scheduler already and take it any number of times; SIGTERM stands for every other.
            within: seconds that they get.
        """
        self._look_for_workers()
        if not self._processes:
            self.kill()
            return
        self._stop_by = time.monotonic() + within
        write_aside(self._folder / STOP_FILE, str(number))
        for process in self._processes.values():
            process.send(WARNING_SIGNAL if number == WARNING_SIGNAL else signal.SIGTERM)

    def kill(self) -> None:
        """End the workers at once; the agent gets a moment to say how they ended."""
        if not self._is_killing:
            self._look_for_the_vanished()
            self._is_killing, self._killed_at = True, time.monotonic()
        self._kill_workers()
        if not self._processes:
            self._kill_agent()

    def kill_everything(self) -> None:
        """Leave nothing behind, workers that have not registered yet included."""
        self._is_killing = True
        self._kill_agent()
        self._kill_workers()

    def failures(self) -> list[Failure]:
        """Why workers failed by themselves; for when all have ended."""
        found = [*self._reported(), *self._those_that_vanished()]
        code = 0 if self._agent is None else self._agent.wait()
        if code != 0 and not found and not self._is_killing:
            found.append(self._unreported(code))
        return found

    def progress(self) -> dict[int, tuple[int, float]]:
        """Rank to the iteration that it has told last, and when it did, in seconds since 1970."""
        told = {}
        for rank in self._ranks:
            path = worker_file(self._folder, rank, "progress")
            with suppress(OSError, ValueError):
                told[rank] = (int(path.read_text()), path.stat().st_mtime)
        return told

    def facts(self) -> dict[int, Any]:
        """Rank to what its worker has reported."""
        paths = {rank: worker_file(self._folder, rank, "facts") for rank in self._ranks}
        return {
            rank: json.loads(path.read_text(encoding="utf-8"))
            for rank, path in paths.items()
            if path.exists()
        }

    def ask(self) -> None:
        """Have every worker write down what it is doing."""
        for rank, process in self._processes.items():
            os.truncate(worker_file(self._folder, rank, "stacks"), 0)
            process.send(signal.SIGUSR2)
            _write_question(worker_file(self._folder, rank, "question"))

    def answers(self) -> dict[int, dict[str, str]]:
        """Rank to its stacks and its answer to `ask`; waits a few seconds for those that can answer."""
        deadline = time.monotonic() + _DUMP_SECONDS
        seen: dict[int, dict[str, str]] = {}
        while time.monotonic() < deadline:
            before, seen = seen, {rank: self._answer_of(rank) for rank in self._processes}
            if seen == before and all(all(answer.values()) for answer in seen.values()):
                break
            time.sleep(_QUIET_SECONDS)
        return seen

    def _answer_of(self, rank: int) -> dict[str, str]:
        answer = {}
        for name in ("stacks", "answer"):
            path = worker_file(self._folder, rank, name)
            answer[name] = path.read_text(errors="replace") if path.exists() else ""
        return answer

    def _look_for_workers(self) -> None:
        for rank in self._ranks:
            path = worker_file(self._folder, rank, "pid")
            if rank not in self._processes and path.exists():
                self._processes[rank] = Process.seen_now(int(path.read_text()))

    def _look_for_the_vanished(self) -> None:
        if self._is_killing:
            return
        for rank, process in self._processes.items():
            # In this order: a worker reports before it ends.
            if rank not in self._vanished and not process.is_alive and not self._has_reported(rank):
                self._vanished[rank] = time.time()

    def _has_reported(self, rank: int) -> bool:
        return any(worker_file(self._folder, rank, name).exists() for name in ("end", "error.json"))

    def _kill_workers(self) -> None:
        self._look_for_workers()
        for process in self._processes.values():
            process.send(signal.SIGKILL)

    def _kill_agent(self) -> None:
        if self._agent is not None and self._agent.poll() is None:
            children = children_of(self._agent.pid)
            self._agent.kill()
            for process in children:
                process.send(signal.SIGKILL)

    def _reported(self) -> Iterator[Failure]:
        for rank in self._ranks:
            path = worker_file(self._folder, rank, "error.json")
            if path.exists():
                yield Failure(**json.loads(path.read_text(encoding="utf-8")))

    def _those_that_vanished(self) -> Iterator[Failure]:
        codes = self._exit_codes()
        for rank, when in self._vanished.items():
            code = codes.get(rank, 1)
            yield self._failure(rank, when - HEAD_START_SECONDS, _death_in_words(code), code)

    def _unreported(self, code: int) -> Failure:
        """A worker that failed before it could say anything, or the agent itself."""
        codes = self._exit_codes()
        rank = min(codes, default=self._ranks[0])
        code = codes.get(rank, code)
        return self._failure(rank, time.time(), _death_in_words(code), code)

    def _failure(self, rank: int, when: float, message: str, code: int) -> Failure:
        return Failure(
            rank=rank,
            host=self._host,
            time=when,
            message=message,
            exit_code=as_exit_code(code),
            unreported=True,
        )

    def _exit_codes(self) -> dict[int, int]:
        path = self._folder / EXIT_CODES_FILE
        if path.exists():
            return {int(rank): int(code) for rank, code in json.loads(path.read_text()).items()}
        if len(self._ranks) == 1 and self._agent is not None and self._agent.returncode is not None:
            return {self._ranks[0]: self._agent.returncode}
        return {}


def _write_question(path: Path) -> None:
    """Wake the thread that answers; a worker without one has nothing to say."""
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
        return "it was killed by SIGKILL; the host may have run out of memory (look into its kernel log)"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code} without saying why"
