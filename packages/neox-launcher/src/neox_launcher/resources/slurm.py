"""Reads the hosts of a Slurm allocation from the variables that sbatch, salloc and srun set."""

import itertools
import re
from collections.abc import Iterator, Mapping

from neox_config.errors import HostfileError
from neox_config.facts.hosts import MOST_HOSTS, MOST_SLOTS
from neox_launcher.resources.host import Host
from neox_launcher.resources.hostfile import shortened

__all__ = ["allocated_hosts", "expand_nodelist", "is_inside_allocation"]

_NODELIST = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
# Up to nine digits: Slurm numbers no more hosts.
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_SMALL = re.compile(r"[0-9]{1,4}")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def is_inside_allocation(environment: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a Slurm job."""
    return any(environment.get(name) for name in _NODELIST)


def allocated_hosts(
    environment: Mapping[str, str], *, slots: int | None = None, unset: str = "--num-nodes N --num-gpus M"
) -> tuple[Host, ...]:
    """Return the hosts of the allocation, in Slurm's order.

    The slots of a host are its GPUs if Slurm reports their number (from `--gpus-per-node`, else those of
    this host); otherwise `slots`, or the number of tasks of the host if `slots` is None.

    Args:
        environment: contains Slurm's variables.
        slots: slots per host if Slurm reports no GPUs.
        unset: options that a plan without an allocation still requires, for the error message.

    Raises:
        HostfileError: there is no allocation, or its variables cannot be parsed.
    """
    text = next((environment[name] for name in _NODELIST if environment.get(name)), None)
    if text is None:
        raise HostfileError(
            "launcher: slurm requires a Slurm allocation, but SLURM_JOB_NODELIST is not set; start "
            f"neox-launch inside sbatch or salloc, or add {unset} for a --dry-run outside",
            code="no-allocation",
        )
    names = expand_nodelist(text)
    each = _gpus_per_host(environment) or slots
    counts = _tasks_of_hosts(environment, len(names)) if each is None else [each] * len(names)
    return tuple(Host(name, tuple(range(count))) for name, count in zip(names, counts, strict=True))


def expand_nodelist(text: str) -> list[str]:
    """Return the names in a list such as `gpu-[001-003,7],login1,rack[1-2]n[1-4]`, in its order.

    Raises:
        HostfileError: the list cannot be parsed.
    """
    every = (name for part in _split(text) for name in _expand(part, text))
    names = list(itertools.islice(every, MOST_HOSTS + 1))
    if len(names) > MOST_HOSTS:
        raise _unreadable(text, f"it has more than {MOST_HOSTS:,} hosts")
    if len(set(names)) != len(names):
        raise _unreadable(text, "a host is listed twice")
    return names


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    outside = _BRACKETS.sub(lambda found: found[0].replace(",", ";"), text)
    for part in outside.split(","):
        if not part.strip():
            raise _unreadable(text, "a name is missing")
        yield part.strip().replace(";", ",")


def _expand(part: str, text: str) -> Iterator[str]:
    pieces = _BRACKETS.split(part)
    # Odd indices contain the text inside brackets.
    choices = [list(_numbers(piece, text)) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if any("[" in piece or "]" in piece for piece in pieces):
        raise _unreadable(text, "its brackets do not match")
    for chosen in itertools.product(*choices):
        yield "".join(chosen)


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Yield the numbers of ranges such as `001-003,7`, keeping leading zeros."""
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _unreadable(text, f"{shortened(item)!r} is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + MOST_HOSTS:
            raise _unreadable(text, f"{shortened(item)!r} is not an ascending range")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _gpus_per_host(environment: Mapping[str, str]) -> int | None:
    """Return the GPUs per host from `8`, `a100:8` or `a100:4,v100:2`; None if Slurm reports none."""
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        text = environment.get(name, "")
        counts = [part.rpartition(":")[2] for part in text.split(",")]
        if text and all(_SMALL.fullmatch(count) for count in counts):
            return sum(int(count) for count in counts) or None
    return None


def _tasks_of_hosts(environment: Mapping[str, str], hosts: int) -> list[int]:
    """Return the tasks of each host: `2(x3),1` is 2, 2, 2, 1; without the variable 1 each."""
    text = environment.get("SLURM_JOB_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not text:
        return [1] * hosts
    counts = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[1]) > MOST_SLOTS or int(match[2] or 1) > MOST_HOSTS:
            raise HostfileError(
                f"SLURM_TASKS_PER_NODE={shortened(text)} cannot be parsed; list the hosts in a hostfile",
                code="invalid-tasks",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts if len(counts) == hosts else [counts[0]] * hosts


def _unreadable(text: str, why: str) -> HostfileError:
    return HostfileError(
        f"Slurm's list of hosts {shortened(text)!r} cannot be parsed: {why}; list the hosts in a hostfile",
        code="invalid-nodelist",
    )
