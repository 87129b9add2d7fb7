"""The hosts and slots of a job, from a hostfile, a Slurm allocation, or this machine."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.derive.problems import placed, refusal
from neox_config.files import why_not_readable
from neox_config.problems import Problem, config_error
from neox_launcher.resources.host import Host
from neox_launcher.resources.hostfile import host_key, read_hostfile
from neox_launcher.resources.selection import ALL, SelectionError, select_hosts
from neox_launcher.resources.slurm import allocated_hosts, is_inside_allocation

__all__ = [
    "DEFAULT_HOSTFILE",
    "FUTURE_ALLOCATION",
    "HOSTFILE_VARIABLE",
    "Pool",
    "find_pool",
    "first_workers",
    "is_this_machine",
    "missing_hostfile",
    "select",
]

DEFAULT_HOSTFILE = Path("/job/hostfile")
HOSTFILE_VARIABLE = "DLTS_HOSTFILE"
FUTURE_ALLOCATION = "a future Slurm allocation"
"""Origin of hosts whose names are not known yet."""
_LOCAL_NAME = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The hosts that a job may use.

    Args:
        hosts: the hosts with all their slots.
        origin: description of the source of this list.
    """

    hosts: tuple[Host, ...]
    origin: str


def find_pool(
    config: NeoXConfig, environment: Mapping[str, str], *, count_gpus: Callable[[], int], processes: int = 1
) -> Pool:
    """Return the hosts that a configuration may use.

    Args:
        config: sets `hostfile` and `launcher`, and `num_gpus` for hosts without GPUs.
        environment: may name a hostfile and contain Slurm's variables.
        count_gpus: counts the GPUs of this machine, which are its slots if it is the only host.
        processes: slots of this machine if it has no GPU and `num_gpus` is not set.

    Raises:
        ConfigError: the hostfile does not exist.
        HostfileError: there is no usable list of hosts.
    """
    launch = config.launch
    missing = missing_hostfile(config)
    if missing is not None:
        raise config_error([missing], config.files)
    path, origin = _hostfile(config, environment)
    if path is not None:
        return Pool(hosts=read_hostfile(path), origin=origin)
    asked = None if launch.num_gpus in (None, ALL) else launch.num_gpus
    if launch.launcher == "slurm":
        if launch.num_nodes != ALL and asked is not None and not is_inside_allocation(environment):
            # Placeholders, which suffice for a plan that is not started.
            names = [f"<host {number} of the allocation>" for number in range(1, launch.num_nodes + 1)]
            future = tuple(Host(name, tuple(range(asked))) for name in names)
            return Pool(hosts=future, origin=FUTURE_ALLOCATION)
        is_set = {"--num-nodes N": launch.num_nodes != ALL, "--num-gpus M": asked is not None}
        unset = " ".join(option for option, given in is_set.items() if not given)
        hosts = allocated_hosts(environment, slots=asked, unset=unset)
        job = environment.get("SLURM_JOB_ID", "")
        return Pool(hosts=hosts, origin=f"Slurm allocation {job}".rstrip())
    slots = count_gpus() or asked or processes
    origin = "this machine; no hostfile"
    if is_inside_allocation(environment):
        origin += " (set launcher: slurm to use the hosts of this Slurm allocation)"
    return Pool(hosts=(Host(_LOCAL_NAME, tuple(range(slots))),), origin=origin)


def missing_hostfile(config: NeoXConfig) -> Problem | None:
    """Return the problem of a configured hostfile that does not exist or cannot be read on this machine."""
    path = config.launch.hostfile
    reason = None if path is None else why_not_readable(path)
    if reason is None:
        return None
    remedy = (
        "correct the path, or use this machine (with launcher: slurm, the hosts of the allocation): --set "
        "hostfile=null"
    )
    return placed(config, Problem("hostfile", reason, remedy, value=path))


def _hostfile(config: NeoXConfig, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the path and the description of the hostfile; None without one or with `launcher: local`."""
    given, named = config.launch.hostfile, environment.get(HOSTFILE_VARIABLE)
    if given is not None:
        return given, f"hostfile {given}"
    if config.launch.launcher == "local":
        return None, ""
    if named:
        return named, f"hostfile {named} ({HOSTFILE_VARIABLE})"
    # One that cannot be read is refused when it is read: a job on this machine alone would be another job.
    if os.path.exists(DEFAULT_HOSTFILE):
        return str(DEFAULT_HOSTFILE), f"hostfile {DEFAULT_HOSTFILE}"
    return None, ""


def select(config: NeoXConfig, pool: Pool) -> tuple[Host, ...]:
    """Return the hosts and slots of a pool that the configuration selects.

    Raises:
        ConfigError: the selection is invalid.
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
        raise refusal(config, error.problem) from error


def first_workers(hosts: Sequence[Host], count: int) -> tuple[Host, ...]:
    """Return the hosts and slots of the first `count` workers."""
    chosen: list[Host] = []
    for host in hosts:
        if count <= 0:
            break
        chosen.append(Host(host.name, host.slots[:count]))
        count -= len(host.slots)
    return tuple(chosen)


def is_this_machine(name: str) -> bool:
    """Return whether a host name is this machine's, without resolving names."""
    return host_key(name) in _keys_of_this_machine(socket.gethostname())


@cache
def _keys_of_this_machine(own: str) -> frozenset[str]:
    names = (_LOCAL_NAME, "127.0.0.1", "::1", own, own.partition(".")[0])
    return frozenset(map(host_key, names))
