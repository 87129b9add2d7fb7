"""The list of hosts: one per line with its device slots, as in `worker-1 slots=4`."""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from neox_launcher.errors import HostfileError
from neox_launcher.resources.host import Host

__all__ = ["host_key", "parse_hostfile", "read_hostfile"]

# What Open MPI adds says how far it may overload a host; no more workers than slots are started here.
_LINE = re.compile(r"(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d+)(\s+max[_-]slots\s*=\s*\d+)?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_MOST_SLOTS = 1024
_EXAMPLE = "write NAME slots=NUMBER, as in: worker-1 slots=8"


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """The hosts of a file, in its order.

    Raises:
        HostfileError: it cannot be read, or a line of it is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise HostfileError(
            f"hostfile: {path} cannot be read ({reason}); {_EXAMPLE}, one host per line"
        ) from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """The hosts of a hostfile's text.

    Empty lines and what follows a `#` do not count. IPv6 addresses may stand in brackets.

    Args:
        text: its lines.
        path: how messages call it.

    Raises:
        HostfileError: with every line that is wrong.
    """
    problems: list[str] = []
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _parse_line(content)
        if isinstance(found, str):
            problems.append(f"  line {number}  {content}\n      {found}")
        elif host_key(found.name) in lines:
            first = lines[host_key(found.name)]
            problems.append(
                f"  lines {first} and {number}  {found.name}\n      stands here twice; write it once, "
                "with all its slots"
            )
        else:
            lines[host_key(found.name)] = number
            hosts.append(found)
    if problems:
        raise HostfileError(_told(path, problems))
    if not hosts:
        raise HostfileError(f"hostfile: {path} names no host; {_EXAMPLE}")
    return tuple(hosts)


def host_key(name: str) -> str:
    """What two spellings of one host have in common; names are compared without regard to case."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower().rstrip(".")


def _parse_line(content: str) -> Host | str:
    """The host of a line, or what is wrong with it."""
    match = _LINE.fullmatch(content)
    if match is None:
        return _EXAMPLE
    name = match["name"].removeprefix("[").removesuffix("]")
    if "@" in name:
        return "a user's name belongs into ~/.ssh/config: the @ joins hosts in include and exclude"
    if not _is_name(name):
        return "is neither a host's name nor an address"
    slots = int(match["slots"])
    if not 0 < slots <= _MOST_SLOTS:
        return f"slots must be 1 to {_MOST_SLOTS}; put a # before a host that is not to be used"
    return Host(name, tuple(range(slots)))


def _is_name(name: str) -> bool:
    """Whether no shell, ssh or pdsh would take it for something else than a host."""
    if _NAME.fullmatch(name):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    zone = getattr(address, "scope_id", None)
    return zone is None or re.fullmatch(r"[A-Za-z0-9_.-]+", zone) is not None


def _told(path: str, problems: Sequence[str]) -> str:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return f"{path}: {count}\n\n" + "\n".join(problems)
