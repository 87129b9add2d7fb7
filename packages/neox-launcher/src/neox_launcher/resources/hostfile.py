"""Reads hostfiles: one host per line with its number of slots, as in `worker-1 slots=4`."""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from neox_config.errors import HostfileError
from neox_config.facts.hosts import MOST_SLOTS
from neox_config.files import why_not_readable
from neox_launcher.resources.host import Host, some_lines

__all__ = ["address_of", "host_key", "is_host_name", "parse_hostfile", "read_hostfile", "shortened"]

# Open MPI's max_slots allows oversubscription, which is not used here; it is accepted and ignored.
_LINE = re.compile(r"(?P<name>\S+)\s+slots\s*=\s*(?P<slots>[0-9]+)(\s+max[_-]slots\s*=\s*[0-9]+)?")
# What may be an address: digits and dots, or with a colon.
_ADDRESS = re.compile(r"[0-9.]+|[^:]*:.*")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_SHOWN = 20
_LONGEST = 80
_EXAMPLE = "write NAME slots=NUMBER, as in: worker-1 slots=8"


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read the hosts of a hostfile, in the order of its lines.

    Raises:
        HostfileError: the file cannot be read, or one of its lines is invalid.
    """
    try:
        reason = why_not_readable(path)
        text = "" if reason else Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        reason = "is not text"
    if reason is not None:
        raise HostfileError(f"hostfile: {path} {reason}; {_EXAMPLE}, one host per line", code="not-readable")
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Parse the text of a hostfile.

    Empty lines and text after a `#` are ignored. IPv6 addresses may be enclosed in brackets.

    Args:
        text: contents of the hostfile.
        path: name of the hostfile in error messages.

    Raises:
        HostfileError: lists all invalid lines.
    """
    problems: list[str] = []
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        found = _parse_line(content)
        if isinstance(found, str):
            problems.append(f"line {number}  {shortened(content)}\n      {found}")
        elif host_key(found.name) in lines:
            first = lines[host_key(found.name)]
            problems.append(
                f"lines {first} and {number}  {found.name}\n      is listed twice; list it once, "
                "with all its slots"
            )
        else:
            lines[host_key(found.name)] = number
            hosts.append(found)
    if problems:
        raise HostfileError(_render(path, problems), code="invalid-lines")
    if not hosts:
        raise HostfileError(f"hostfile: {path} contains no hosts; {_EXAMPLE}", code="no-hosts")
    return tuple(hosts)


def host_key(name: str) -> str:
    """Return a key that is equal for all spellings of a host; names are case-insensitive."""
    address = address_of(name)
    return name.lower().rstrip(".") if address is None else str(address)


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a name is; None for a host name."""
    # The exception of `ip_address` is slow, and lists may have 10,000 names.
    if not (_ADDRESS.fullmatch(name)):
        return None
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def shortened(text: str) -> str:
    """Return the text as shown in a message; long ones are cut."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _parse_line(content: str) -> Host | str:
    """Return the host of a line, or its problem as text."""
    match = _LINE.fullmatch(content)
    if match is None:
        return _EXAMPLE
    name = match["name"].removeprefix("[").removesuffix("]")
    if "@" in name:
        return (
            "user names are not supported, because @ separates hosts in include and exclude; set User in "
            "~/.ssh/config"
        )
    if not is_host_name(name):
        return "is neither a host name nor an address"
    slots = match["slots"].lstrip("0")
    if not slots or len(slots) > len(str(MOST_SLOTS)) or int(slots) > MOST_SLOTS:
        return f"slots must be 1 to {MOST_SLOTS}; to skip a host, put a # before its line"
    return Host(name, tuple(range(int(slots))))


def is_host_name(name: str) -> bool:
    """Return whether the text is a host name or address that is safe for a shell, ssh and pdsh."""
    # A name whose last part is a number would be read as an incomplete or invalid IPv4 address.
    if _NAME.fullmatch(name) and not name.rstrip(".").rpartition(".")[2].isdigit():
        return True
    address = address_of(name)
    if address is None:
        return False
    zone = getattr(address, "scope_id", None)
    return zone is None or re.fullmatch(r"[A-Za-z0-9_.-]+", zone) is not None


def _render(path: str, problems: Sequence[str]) -> str:
    count = f"{len(problems):,} problem{'s' if len(problems) > 1 else ''}"
    return f"{path}: {count}\n\n" + "\n".join(f"  {line}" for line in some_lines(problems, _SHOWN))
