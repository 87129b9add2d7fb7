"""The cluster's own tools at work: the commands that start nodes, and what they print.

They run in sessions of their own, so that Ctrl-C in the terminal reaches the launcher alone. What they print
is kept until all nodes have reported, because it explains why one has not; later it goes to stderr.
"""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from neox_launcher.backends.base import Command
from neox_launcher.errors import LaunchError
from neox_launcher.stop_signals import warning_blocked
from neox_launcher.terminal import tell

__all__ = ["Tools"]

_CHUNK = 64 * 1024
_KEPT_BYTES = 64 * 1024


class Tools:
    """The running commands of one launch.

    Args:
        commands: to start, all at once.
        selector: gets a callable as data for everything to wait for.
        shares_terminal: they read and write the launcher's own terminal.

    Raises:
        LaunchError: a command cannot be started.
    """

    def __init__(
        self, commands: Sequence[Command], selector: selectors.BaseSelector, *, shares_terminal: bool
    ) -> None:
        self._selector, self._shares_terminal = selector, shares_terminal
        self._kept: dict[int, bytes] = {}
        self._is_talking = False
        self._processes: list[tuple[Command, subprocess.Popen[bytes]]] = []
        try:
            for command in commands:
                self._start(command)
        except OSError as error:
            self.end()
            raise LaunchError(f"{command.argv[0]} cannot be started: {error.strerror}") from error

    def _start(self, command: Command) -> None:
        for path, content in command.files.items():
            _write_private(Path(path), content)
        streams: dict[str, int | None] = {"stdin": subprocess.PIPE if command.stdin else None}
        if not self._shares_terminal:
            streams = {
                "stdin": subprocess.PIPE if command.stdin else subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
            }
        environment = {**os.environ, **command.environment}
        # A scheduler may signal every process of a job; the launcher passes its warning on itself.
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
        """Whether all commands have."""
        return all(process.poll() is not None for _, process in self._processes)

    def has_given_up_on(self, node: int) -> bool:
        """Whether every command that could still start a node has ended, or says that it will not."""
        return all(
            process.poll() is not None or command.has_given_up(node)
            for command, process in self._processes
            if command.node in (None, node)
        )

    def said(self, node: int | None = None) -> str:
        """What the commands that start a node have printed; those of all nodes without one."""
        self.read_all()
        kept = [
            self._kept.get(number, b"")
            for number, (command, _) in enumerate(self._processes)
            if node is None or command.node in (None, node)
        ]
        return b"".join(kept).decode(errors="replace").strip()

    def talk(self) -> None:
        """From now on what they print goes to stderr, with what they have printed before."""
        self._is_talking = True
        for number in list(self._kept):
            self._print(number)

    def read_all(self) -> None:
        """Take over what the commands have printed."""
        for number in range(len(self._processes)):
            self._read(number)

    def end(self, *, patience: float = 0.0) -> None:
        """End them, if they do not end by themselves.

        Args:
            patience: seconds that they get, as those need whose nodes have just left.
        """
        deadline = time.monotonic() + patience
        while not self.have_ended and time.monotonic() < deadline:
            self.read_all()
            time.sleep(0.02)
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
            time.sleep(0.02)

    def _read(self, number: int) -> None:
        stdout = self._processes[number][1].stdout
        if stdout is None or stdout.closed:
            return
        while data := _read_now(stdout.fileno()):
            self._kept[number] = (self._kept.get(number, b"") + data)[-_KEPT_BYTES:]
        if data == b"":
            with suppress(KeyError):
                self._selector.unregister(stdout)
        if self._is_talking:
            self._print(number)

    def _print(self, number: int) -> None:
        tell(self._kept.pop(number, b"").decode(errors="replace"))


def _read_now(descriptor: int) -> bytes | None:
    """What can be read without waiting; None when there is nothing yet, empty at the end."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None


def _write_private(path: Path, content: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
