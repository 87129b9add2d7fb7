"""The hosts and slots of a job: from a hostfile, Slurm's allocation, or this machine alone."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neox_launcher.config import NeoXConfig
from neox_launcher.config.problems import config_error, in_words, place_of
from neox_launcher.resources.host import Host
from neox_launcher.resources.hostfile import host_key, read_hostfile
from neox_launcher.resources.selection import ALL, SelectionError, select_hosts
from neox_launcher.resources.slurm import allocated_hosts, is_inside_allocation

__all__ = [
    "DEFAULT_HOSTFILE",
    "HOSTFILE_VARIABLE",
    "Pool",
    "find_pool",
    "first_workers",
    "is_this_machine",
    "select",
]

DEFAULT_HOSTFILE = Path("/job/hostfile")
HOSTFILE_VARIABLE = "DLTS_HOSTFILE"
_LOCAL_NAME = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What a job may use.

    Args:
        hosts: with all their slots.
        origin: where they come from, in words.
    """

    hosts: tuple[Host, ...]
    origin: str


def find_pool(
    config: NeoXConfig, environment: Mapping[str, str], *, count_gpus: Callable[[], int], processes: int = 1
) -> Pool:
    """The hosts that a configuration may use.

    Args:
        config: says `hostfile`, `launcher`, and `num_gpus` for where no device limits the slots.
        environment: may name a hostfile, and holds Slurm's variables.
        count_gpus: counts this machine's GPUs, its slots where it works alone.
        processes: its slots where there are none and `num_gpus` does not say it.

    Raises:
        HostfileError: there is no usable list of hosts.
    """
    launch = config.launch
    path, origin = _hostfile(config, environment)
    if path is not None:
        return Pool(hosts=read_hostfile(path), origin=origin)
    asked = None if launch.num_gpus in (None, ALL) else launch.num_gpus
    if launch.launcher == "slurm":
        if launch.num_nodes != ALL and asked is not None and not is_inside_allocation(environment):
            return _pool_to_come(launch.num_nodes, asked)
        hosts = allocated_hosts(environment, slots=asked)
        job = environment.get("SLURM_JOB_ID", "")
        return Pool(hosts=hosts, origin=f"Slurm allocation {job}".rstrip())
    slots = count_gpus() or asked or processes
    origin = "this machine; no hostfile"
    if is_inside_allocation(environment):
        origin += " (the hosts of this Slurm allocation are used with launcher: slurm)"
    return Pool(hosts=(Host(_LOCAL_NAME, tuple(range(slots))),), origin=origin)


def _pool_to_come(hosts: int, slots: int) -> Pool:
    """An allocation that is not made yet: enough for a plan, which its backend refuses to start."""
    names = [f"<host {number} of the allocation>" for number in range(1, hosts + 1)]
    return Pool(
        hosts=tuple(Host(name, tuple(range(slots))) for name in names),
        origin="a Slurm allocation, which is still to be made",
    )


def _hostfile(config: NeoXConfig, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """The hostfile to read, and how it is called; none where there is none, or this machine is asked for."""
    given, named = config.launch.hostfile, environment.get(HOSTFILE_VARIABLE)
    if given is not None:
        return given, f"hostfile {given}"
    if config.launch.launcher == "local":
        return None, ""
    if named:
        return named, f"hostfile {named} ({HOSTFILE_VARIABLE})"
    if DEFAULT_HOSTFILE.exists():
        return str(DEFAULT_HOSTFILE), f"hostfile {DEFAULT_HOSTFILE}"
    return None, ""


def select(config: NeoXConfig, pool: Pool) -> tuple[Host, ...]:
    """The hosts and slots of a pool that the configuration chooses.

    Raises:
        ConfigError: the choice cannot be.
    """
    launch = config.launch
    try:
        return select_hosts(
            pool.hosts,
            include=launch.include,
            exclude=launch.exclude,
            num_nodes=launch.num_nodes,
            num_gpus=launch.num_gpus,
        )
    except SelectionError as error:
        name = error.problem.name
        located = error.problem.located(place_of(config.sources, name), in_words(config.value_of(name)))
        raise config_error([located], config.files) from error


def first_workers(hosts: Sequence[Host], count: int) -> tuple[Host, ...]:
    """The hosts of the first workers, with no more slots than these need."""
    chosen: list[Host] = []
    for host in hosts:
        slots = host.slots[: count - sum(len(each.slots) for each in chosen)]
        if slots:
            chosen.append(Host(host.name, slots))
    return tuple(chosen)


def is_this_machine(name: str) -> bool:
    """Whether a host's name is this machine's own, as far as that can be told without resolving names."""
    own = socket.gethostname()
    names = (_LOCAL_NAME, "127.0.0.1", "::1", own, own.partition(".")[0])
    return host_key(name) in {host_key(known) for known in names}
