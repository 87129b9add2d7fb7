"""Selects hosts and slots of a pool according to `include`, `exclude`, `num_nodes` and `num_gpus`.

The syntax is that of DeepSpeed's runner: NAME[:SLOT[,SLOT ...]] joined by `@`; a name without slots means
all slots of that host. Hosts keep the order of the pool, independent of `include`; slots are in ascending
order. Unlike DeepSpeed, this raises an error if there are fewer hosts or slots than requested.
"""

from collections.abc import Iterator, Mapping, Sequence

from neox_config.facts.hosts import MOST_SLOTS
from neox_config.pluralize import pluralize
from neox_config.problems import Problem
from neox_launcher.resources.host import Host, name_some
from neox_launcher.resources.hostfile import host_key, shortened

__all__ = ["ALL", "SelectionError", "parse_selection", "select_hosts"]

ALL = -1


class SelectionError(Exception):
    """An invalid selection of hosts.

    Args:
        problem: the reason, with the name of the parameter and without its location.
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
    """Return the hosts and slots to use, in the order of the pool.

    Args:
        pool: available hosts.
        include: hosts and slots to use; not together with `exclude`.
        exclude: hosts and slots not to use.
        num_nodes: number of hosts to use, the first of the remaining ones; -1 for all.
        num_gpus: number of slots to use of every host, from 0; None or -1 for all. Not together with
            `include` or `exclude`.

    Raises:
        SelectionError: the selection names unknown hosts or slots, is empty, or contradicts itself.
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
        raise SelectionError(Problem(name, "leaves no host to train on", "select at least one host"))
    slots = ALL if num_gpus is None else num_gpus
    return tuple(_first_slots(host, slots) for host in _first_hosts(hosts, num_nodes))


def parse_selection(text: str, pool: Sequence[Host], parameter: str) -> dict[str, tuple[int, ...]]:
    """Return a dict from host name to slots for every host that the text names.

    Args:
        text: NAME[:SLOT[,SLOT ...]], joined by `@`.
        pool: available hosts.
        parameter: name of the parameter whose value the text is.

    Raises:
        SelectionError: the text is malformed, or names unknown hosts or slots.
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
    """Return one host and its slots, None for all of them."""
    whole = known.get(host_key(_bare(part)))
    if whole is not None:
        return whole, None
    name, colon, listed = part.rpartition(":")
    host = known.get(host_key(_bare(name))) if colon else None
    if host is None:
        raise SelectionError(_unknown_host(part, known, parameter))
    return host, tuple(_parse_slots(listed, host, parameter))


def _bare(name: str) -> str:
    """Return the name without the brackets that may enclose an address."""
    name = name.strip()
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _parse_slots(listed: str, host: Host, parameter: str) -> Iterator[int]:
    for text in listed.split(","):
        slot = text.strip()
        if not (slot.isascii() and slot.isdigit()):
            what = (
                f"has {shortened(slot)!r} as a slot of {host.name}"
                if slot
                else f"lacks a slot after {host.name}:"
            )
            raise SelectionError(Problem(parameter, what, "write slots as numbers: worker-1:0,2"))
        number = int(slot) if len(slot) <= len(str(MOST_SLOTS)) else MOST_SLOTS
        if number not in host.slots:
            have = f"slots 0 to {host.slots[-1]}" if len(host.slots) > 1 else "only slot 0"
            what = f"names slot {shortened(slot)} of {host.name}, which has {have}"
            raise SelectionError(Problem(parameter, what))
        yield number


def _unknown_host(part: str, known: Mapping[str, Host], parameter: str) -> Problem:
    if not part:
        return Problem(parameter, "has an empty part", "write NAME[:SLOT[,SLOT ...]], joined by single @")
    name = part.partition(":")[0] if part.count(":") == 1 else part
    remedy = f"available hosts: {name_some([host.name for host in known.values()])}"
    return Problem(parameter, f"names {shortened(name)}, which is not among the hosts", remedy)


def _first_hosts(hosts: Sequence[Host], count: int) -> Sequence[Host]:
    if count > len(hosts):
        what = f"is more than the {pluralize(len(hosts), 'host')} available"
        raise SelectionError(Problem("num_nodes", what, f"use at most {len(hosts)}, or -1 for all"))
    return hosts if count == ALL else hosts[:count]


def _first_slots(host: Host, count: int) -> Host:
    if count > len(host.slots):
        what = f"is more than the {pluralize(len(host.slots), 'slot')} of {host.name}"
        raise SelectionError(Problem("num_gpus", what, f"use at most {len(host.slots)}"))
    return host if count == ALL else Host(host.name, host.slots[:count])
