"""Finds unresolvable host names before anything is started."""

import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["CheckedNames", "check_names"]

_MOST_AT_ONCE = 64
_PATIENCE_SECONDS = 10
_DEADLINE_SECONDS = 60.0
_REPORT_SECONDS = 5.0
_NONE = ("none", "")


@dataclass(frozen=True, slots=True)
class CheckedNames:
    """Result of a check of host names.

    Args:
        unknown: names that cannot be resolved.
        unchecked: names without an answer within the time.
    """

    unknown: tuple[str, ...]
    unchecked: tuple[str, ...]


def check_names(
    names: Sequence[str],
    report: Callable[[int], None],
    *,
    within: float = _DEADLINE_SECONDS,
    every: float = _REPORT_SECONDS,
) -> CheckedNames:
    """Find the names that neither the resolver of this machine nor the user's ssh configuration knows.

    The ssh configuration may map a host to another name, or reach it through another host, which then
    resolves the name.

    Args:
        names: host names or addresses.
        report: is called with the number of answers so far, if the check takes long.
        within: seconds after which names without an answer are left unchecked.
        every: seconds between two reports.
    """
    answers: dict[str, bool] = {}
    end = time.monotonic() + within
    arriving = _ask(names)
    next_report = time.monotonic() + every
    while len(answers) < len(names):
        now = time.monotonic()
        if now >= end:
            break
        if now >= next_report:
            report(len(answers))
            next_report = now + every
        try:
            name, is_known = arriving.get(timeout=max(0.0, min(end, next_report) - now))
        except queue.Empty:
            continue
        answers[name] = is_known
    return CheckedNames(
        unknown=tuple(name for name in names if answers.get(name) is False),
        unchecked=tuple(name for name in names if name not in answers),
    )


def _ask(names: Sequence[str]) -> queue.SimpleQueue[tuple[str, bool]]:
    """Resolve names in threads; return the queue that receives the answers."""
    open_names: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
    for name in names:
        open_names.put(name)

    def work() -> None:
        while True:
            try:
                name = open_names.get_nowait()
            except queue.Empty:
                return
            answers.put((name, _is_known(name)))

    # Daemons: nothing can interrupt a resolver that does not answer, and a pool would wait for it at the end.
    for _ in range(min(_MOST_AT_ONCE, len(names))):
        threading.Thread(target=work, daemon=True).start()
    return answers


def _is_known(name: str) -> bool:
    return _resolves(name) or _is_reached_by_ssh(name)


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def _is_reached_by_ssh(name: str) -> bool:
    """Return whether `ssh -G`, which does not connect, reports a resolvable name, a proxy or a jump host."""
    ssh = shutil.which("ssh")
    if ssh is None:
        return False
    try:
        reported = subprocess.run(
            [ssh, "-G", name], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    settings = dict(line.partition(" ")[::2] for line in reported.stdout.splitlines())
    if any(settings.get(way, "none") not in _NONE for way in ("proxyjump", "proxycommand")):
        return True
    other = settings.get("hostname", name)
    return other != name and _resolves(other)
