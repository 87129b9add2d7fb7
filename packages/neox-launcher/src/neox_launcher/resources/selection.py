"""`include`, `exclude`, `num_nodes` and `num_gpus`: which hosts and slots of a pool are used.

The grammar is that of DeepSpeed's runner: NAME[:SLOT[,SLOT ...]] joined by `@`, a name alone meaning all
slots of that host. Hosts keep the pool's order whatever the order in `include`; slots are in rising order.
Where DeepSpeed takes fewer hosts than asked for, or more slots than there are, this refuses.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence

from neox_launcher.config.problems import Problem
from neox_launcher.resources.host import Host
from neox_launcher.resources.hostfile import host_key

__all__ = ["ALL", "SelectionError", "parse_selection", "select_hosts"]

ALL = -1
_SHOWN_NAMES = 6


class SelectionError(Exception):
    """A choice of hosts that cannot be; `problem` says why, without place.

    Args:
        problem: names the parameter.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


def select_hosts(
    pool: Sequence[Host],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int = ALL,
    num_gpus: int | None = None,
) -> tuple[Host, ...]:
    """The hosts and slots to use, in the pool's order.

    Args:
        pool: what there is.
        include: only these; excludes the next.
        exclude: all but these.
        num_nodes: the first so many of the hosts that are left; -1 for all.
        num_gpus: slots 0 to N-1 of every host; None or -1 for all; not together with the first two.

    Raises:
        SelectionError: the choice names what is not there, leaves nothing, or contradicts itself.
    """
    chosen = {host.name: host.slots for host in pool}
    if include is not None:
        chosen = parse_selection(include, pool, "include")
    if exclude is not None:
        out = parse_selection(exclude, pool, "exclude")
        chosen = {
            name: tuple(slot for slot in slots if slot not in out.get(name, ()))
            for name, slots in chosen.items()
        }
    hosts = [Host(host.name, chosen[host.name]) for host in pool if chosen.get(host.name)]
    if not hosts:
        name = "exclude" if exclude is not None else "include"
        raise SelectionError(Problem(name, "leaves no host to train on", "leave out fewer"))
    return tuple(_first_slots(_first_hosts(hosts, num_nodes), num_gpus))


def parse_selection(text: str, pool: Sequence[Host], parameter: str) -> dict[str, tuple[int, ...]]:
    """Host name to slots, for every host that the text names.

    Args:
        text: NAME[:SLOT[,SLOT ...]], joined by `@`.
        pool: the hosts that may be named.
        parameter: whose value the text is.

    Raises:
        SelectionError: it is written wrongly, or names what is not there.
    """
    known = {host_key(host.name): host for host in pool}
    found: dict[str, set[int]] = {}
    whole: set[str] = set()
    for part in text.split("@"):
        host, slots = _parse_part(part.strip(), known, parameter)
        if (slots is None) != (host.name in whole) and host.name in found:
            what = f"names {host.name} both as a whole and with slots"
            raise SelectionError(Problem(parameter, what, "keep one of the two"))
        if slots is None:
            whole.add(host.name)
        found.setdefault(host.name, set()).update(host.slots if slots is None else slots)
    return {name: tuple(sorted(slots)) for name, slots in found.items()}


def _parse_part(part: str, known: Mapping[str, Host], parameter: str) -> tuple[Host, tuple[int, ...] | None]:
    """One host and its slots; None stands for all of them."""
    whole = known.get(host_key(_bare(part)))
    if whole is not None:
        return whole, None
    name, colon, listed = part.rpartition(":")
    host = known.get(host_key(_bare(name))) if colon else None
    if host is None:
        raise SelectionError(_unknown_host(part, known, parameter))
    return host, tuple(_parse_slots(listed, host, parameter))


def _bare(name: str) -> str:
    """Without the brackets that an address may stand in."""
    name = name.strip()
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _parse_slots(listed: str, host: Host, parameter: str) -> Iterator[int]:
    for text in listed.split(","):
        slot = text.strip()
        if not (slot.isascii() and slot.isdigit()):
            what = f"has {slot!r} for a slot of {host.name}" if slot else f"lacks a slot after {host.name}:"
            raise SelectionError(Problem(parameter, what, "write slots as numbers: worker-1:0,2"))
        if int(slot) not in host.slots:
            have = f"slots 0 to {host.slots[-1]}" if len(host.slots) > 1 else "slot 0 alone"
            raise SelectionError(Problem(parameter, f"names slot {slot} of {host.name}, which has {have}"))
        yield int(slot)


def _unknown_host(part: str, known: Mapping[str, Host], parameter: str) -> Problem:
    if not part:
        return Problem(parameter, "has an empty part", "write NAME[:SLOT[,SLOT ...]], joined by single @")
    name = part.partition(":")[0] if part.count(":") == 1 else part
    names = [host.name for host in known.values()]
    near = difflib.get_close_matches(name, names, n=1)
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    remedy = f"did you mean {near[0]}?" if near else f"there is {shown}"
    return Problem(parameter, f"names {name}, which is not among the hosts", remedy)


def _first_hosts(hosts: Sequence[Host], count: int) -> Sequence[Host]:
    if count == ALL:
        return hosts
    if count > len(hosts):
        have = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
        raise SelectionError(
            Problem(
                "num_nodes",
                f"is more than the {have} that there are",
                f"use at most {len(hosts)}, or -1 for all",
            )
        )
    return hosts[:count]


def _first_slots(hosts: Sequence[Host], count: int | None) -> Iterator[Host]:
    for host in hosts:
        if count is None or count == ALL:
            yield host
            continue
        if count > len(host.slots):
            have = f"{len(host.slots)} slot{'s' if len(host.slots) > 1 else ''}"
            raise SelectionError(
                Problem(
                    "num_gpus", f"is more than the {have} of {host.name}", f"use at most {len(host.slots)}"
                )
            )
        yield Host(host.name, host.slots[:count])
