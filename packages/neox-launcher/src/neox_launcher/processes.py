"""Processes by number and start: a number alone may mean another process by now. Linux's /proc."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["SIGNALLED", "Process", "as_exit_code", "children_of"]

SIGNALLED = 128


@dataclass(frozen=True, slots=True)
class Process:
    """A process that may have ended.

    Args:
        pid: its number.
        started: when, in the kernel's clock; None when it had ended before it was looked at.
    """

    pid: int
    started: str | None

    @classmethod
    def seen_now(cls, pid: int) -> Self:
        """The process that has this number now."""
        return cls(pid, _start_of(pid))

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; one that ended and was not waited for does not."""
        return self.started is not None and _start_of(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def children_of(parent: int) -> list[Process]:
    """The processes that a process has started and that have not ended."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                children.append(Process.seen_now(int(path.parent.name)))
    return children


def as_exit_code(code: int) -> int:
    """A process's return code as a shell shows it."""
    return code if code >= 0 else SIGNALLED - code


def _start_of(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
