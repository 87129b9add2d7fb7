"""The commands of the cluster's own tools that start the agents, and what they print.

They run in separate sessions, so that Ctrl-C in the terminal reaches only the launcher. Their output is kept
until all agents have connected, because it explains why one has not; after that it goes to stderr.
"""

import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from neox_config.errors import LaunchError
from neox_launcher.backends.base import Command
from neox_launcher.controller.terminal import pass_on
from neox_launcher.protocol.stop_signals import warning_blocked

__all__ = ["StartCommands"]

_CHUNK = 64 * 1024
_KEPT_BYTES = 64 * 1024


class StartCommands:
    """The running commands of one launch.

    Args:
        commands: commands to start, all at the same time.
        selector: waits for their output; the data of each registration is a callable.
        shares_terminal: the commands read and write the terminal of the launcher.

    Raises:
        LaunchError: a command cannot be started.
    """

    def __init__(
        self, commands: Sequence[Command], selector: selectors.BaseSelector, *, shares_terminal: bool
    ) -> None:
        self._selector, self._shares_terminal = selector, shares_terminal
        self._kept: dict[int, bytes] = {}
        self._is_talking = False
        self._of_host: dict[int | None, list[int]] = defaultdict(list)
        self._processes: list[tuple[Command, subprocess.Popen[bytes]]] = []
        try:
            for command in commands:
                self._start(command)
                self._of_host[command.host_number].append(len(self._processes) - 1)
        except OSError as error:
            self.end()
            remedy = "; shorten launcher-args, remote-setup or remote-prefix" * (error.errno == errno.E2BIG)
            raise LaunchError(f"{command.argv[0]} cannot be started: {error.strerror}{remedy}") from error

    def _start(self, command: Command) -> None:
        for path, content in command.files.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
        streams: dict[str, int | None] = {}
        if not self._shares_terminal:
            streams = {
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
            }
        if command.stdin:
            streams["stdin"] = subprocess.PIPE
        environment = {**os.environ, **command.environment}
        # A scheduler may signal every process of a job; the launcher forwards the warning itself.
        with warning_blocked():
            process = subprocess.Popen(command.argv, env=environment, start_new_session=True, **streams)  # type: ignore[call-overload]
        self._processes.append((command, process))
        if command.stdin:
            with suppress(BrokenPipeError):
                process.stdin.write(command.stdin.encode())
                process.stdin.close()
        if process.stdout is not None:
            number = len(self._processes) - 1
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._read(number))

    @property
    def have_ended(self) -> bool:
        """Whether all commands have ended."""
        return all(process.poll() is not None for _, process in self._processes)

    def has_given_up_on(self, host_number: int) -> bool:
        """Return whether no command can start the agent of a host any more: all have ended or failed.

        A host without a command is started by the scheduler, which may still do so.
        """
        ended = [
            process.poll() is not None or command.has_given_up(host_number)
            for command, process in map(self._processes.__getitem__, self._numbers_of(host_number))
        ]
        return bool(ended) and all(ended)

    def starts(self, host_number: int) -> bool:
        """Return whether a command starts the agent of a host; a scheduler may have started it instead."""
        return bool(self._numbers_of(host_number))

    def said(self, host_number: int | None = None) -> str:
        """Return the output of the commands that start the agent of a host; without a number, of all."""
        self.read_all()
        numbers = range(len(self._processes)) if host_number is None else self._numbers_of(host_number)
        return b"".join(self._kept.get(number, b"") for number in numbers).decode(errors="replace").strip()

    def _numbers_of(self, host_number: int) -> list[int]:
        """Return the indices of the commands that start the agent of a host."""
        return [*self._of_host.get(None, ()), *self._of_host.get(host_number, ())]

    def talk(self) -> None:
        """Print their output to stderr from now on, beginning with the output so far."""
        self._is_talking = True
        for number in list(self._kept):
            self._print(number)

    def read_all(self) -> None:
        """Read the output of the commands that is available."""
        for number in range(len(self._processes)):
            self._read(number)

    def end(self, *, patience: float = 0.0) -> None:
        """Terminate the commands that do not end by themselves.

        Args:
            patience: seconds to wait first, for commands whose agents have just ended.
        """
        self._wait(patience)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for _, process in self._processes:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            self._wait(1.0)
        self.read_all()
        for _, process in self._processes:
            if process.stdout is not None:
                process.stdout.close()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.have_ended and time.monotonic() < deadline:
            self.read_all()
            time.sleep(0.02)

    def _read(self, number: int) -> None:
        stdout = self._processes[number][1].stdout
        if stdout is None or stdout.closed:
            return
        with suppress(BlockingIOError):  # There is no more data yet.
            while data := os.read(stdout.fileno(), _CHUNK):
                self._kept[number] = (self._kept.get(number, b"") + data)[-_KEPT_BYTES:]
            with suppress(KeyError):
                self._selector.unregister(stdout)
        if self._is_talking:
            self._print(number)

    def _print(self, number: int) -> None:
        pass_on(sys.stderr, self._kept.pop(number, b""))
