"""The hosts of a Slurm allocation, from the variables that sbatch, salloc and srun set."""

import itertools
import re
from collections.abc import Iterator, Mapping

from neox_launcher.errors import HostfileError
from neox_launcher.resources.host import Host

__all__ = ["allocated_hosts", "expand_nodelist", "is_inside_allocation"]

_NODELIST = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MOST_HOSTS = 100_000


def is_inside_allocation(environment: Mapping[str, str]) -> bool:
    """Whether this process belongs to a Slurm job."""
    return any(environment.get(name) for name in _NODELIST)


def allocated_hosts(environment: Mapping[str, str], *, slots: int | None = None) -> tuple[Host, ...]:
    """The hosts of the allocation, in Slurm's order.

    A host's slots are its GPUs where Slurm says how many (`--gpus-per-node`, else those of the host that
    asks); where Slurm knows of none, they are what is asked for here, else the tasks of that host.

    Args:
        environment: with Slurm's variables.
        slots: of each host, where Slurm counts no GPUs.

    Raises:
        HostfileError: there is no allocation, or its variables cannot be read.
    """
    text = next((environment[name] for name in _NODELIST if environment.get(name)), None)
    if text is None:
        raise HostfileError(
            "launcher: slurm needs an allocation, and this is none (SLURM_JOB_NODELIST is not set); "
            "start it inside sbatch or salloc; for a --dry-run outside, set num-nodes and num-gpus"
        )
    names = expand_nodelist(text)
    each = _gpus_per_host(environment) or slots
    counts = _tasks_of_hosts(environment, len(names)) if each is None else [each] * len(names)
    return tuple(Host(name, tuple(range(count))) for name, count in zip(names, counts, strict=True))


def expand_nodelist(text: str) -> list[str]:
    """The names that a list like `gpu-[001-003,7],login1,rack[1-2]n[1-4]` stands for, in its order.

    Raises:
        HostfileError: the list cannot be read.
    """
    names = [name for part in _split(text) for name in _expand(part, text)]
    if len(set(names)) != len(names):
        raise _unreadable(text, "a host stands there twice")
    return names


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that are outside brackets."""
    outside = _BRACKETS.sub(lambda found: found[0].replace(",", ";"), text)
    for part in outside.split(","):
        if not part.strip():
            raise _unreadable(text, "a name is missing")
        yield part.strip().replace(";", ",")


def _expand(part: str, text: str) -> Iterator[str]:
    pieces = _BRACKETS.split(part)
    # Odd places hold what stood inside brackets.
    choices = [list(_numbers(piece, text)) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if any("[" in piece or "]" in piece for piece in pieces):
        raise _unreadable(text, "its brackets do not match")
    for chosen in itertools.product(*choices):
        yield "".join(chosen)


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """The numbers of `001-003,7`; leading zeros stay."""
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _unreadable(text, f"{item!r} is no range of numbers")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MOST_HOSTS:
            raise _unreadable(text, f"{item!r} is no rising range")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _gpus_per_host(environment: Mapping[str, str]) -> int | None:
    """GPUs of each host: `8`, `a100:8` or `a100:4,v100:2`; None where Slurm counts none."""
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        text = environment.get(name, "")
        counts = [part.rpartition(":")[2] for part in text.split(",")]
        if text and all(count.isdigit() for count in counts):
            return sum(int(count) for count in counts) or None
    return None


def _tasks_of_hosts(environment: Mapping[str, str], hosts: int) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1; without the variable there is one task on each host."""
    text = environment.get("SLURM_JOB_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not text:
        return [1] * hosts
    counts = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise HostfileError(f"SLURM_TASKS_PER_NODE={text} cannot be read; name the hosts in a hostfile")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts if len(counts) == hosts else [counts[0]] * hosts


def _unreadable(text: str, why: str) -> HostfileError:
    return HostfileError(
        f"Slurm's list of hosts {text!r} cannot be read: {why}; name the hosts in a hostfile"
    )
