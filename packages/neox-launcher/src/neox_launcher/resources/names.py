"""Which hosts' names lead nowhere: found out before anything is started, all at once."""

import shutil
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

__all__ = ["unresolved_names"]

_MOST_AT_ONCE = 64
_PATIENCE_SECONDS = 10
_NONE = ("none", "")


def unresolved_names(names: Sequence[str]) -> list[str]:
    """Those of the names that neither this machine's resolver nor the user's ssh knows.

    ssh's own configuration may give a host another name, or reach it through another host, whose resolver
    counts then.

    Args:
        names: of hosts, or addresses.
    """
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        known = pool.map(_is_known, names)
        return [name for name, is_known in zip(names, known, strict=True) if not is_known]


def _is_known(name: str) -> bool:
    return _resolves(name) or _is_reached_by_ssh(name)


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def _is_reached_by_ssh(name: str) -> bool:
    """Whether `ssh -G`, which connects to nothing, knows a name that resolves, or a way through."""
    ssh = shutil.which("ssh")
    if ssh is None:
        return False
    try:
        told = subprocess.run(
            [ssh, "-G", name], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    settings = dict(line.partition(" ")[::2] for line in told.stdout.splitlines())
    if any(settings.get(way, "none") not in _NONE for way in ("proxyjump", "proxycommand")):
        return True
    other = settings.get("hostname", name)
    return other != name and _resolves(other)
