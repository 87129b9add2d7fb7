"""Detects that a scheduler has started `neox-launch` once per host, from the variables that it sets.

Kubernetes (PyTorchJob, TrainJob and similar resources) and `srun neox-launch` start one process per host.
Without this, each of them would train separately.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from neox_config.errors import LaunchError
from neox_config.facts.hosts import MOST_HOSTS
from neox_config.pluralize import pluralize
from neox_launcher.protocol.handshake import TOKEN_VARIABLE
from neox_launcher.resources.slurm import expand_nodelist

__all__ = ["Member", "find_member"]

_SECRET_LENGTH = 32
_DEFAULT_PORT = 29500
_LONGEST_NUMBER = 12
# Ports for the steps of Slurm jobs, which may share hosts: below those that Linux gives to connections.
_SLURM_PORTS = range(20_000, 30_000)
# Set for every process by its MPI: the number of processes.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_NRANKS")
_DOCUMENT = 'docs/launching.md, "Started by a scheduler on every host"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of several `neox-launch` processes of a job, one per host.

    Args:
        rank: number of this process. Process 0 launches; the others join it and start the workers of their
            hosts.
        names: names of the hosts in the plan, by rank.
        address: address of process 0.
        port: port on which process 0 accepts the others.
        token: secret that all processes share.
        origin: description of the scheduler's variables.
    """

    rank: int
    names: tuple[str, ...]
    address: str
    port: int
    token: str = field(repr=False)
    origin: str

    @property
    def launches(self) -> bool:
        """Whether this process is the one that the others join."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """Name of this host in the plan."""
        return self.names[self.rank]


def find_member(environment: Mapping[str, str]) -> Member | None:
    """Return the place of this process among those that a scheduler started; None if it is the only one.

    Args:
        environment: contains the variables of the scheduler.

    Raises:
        LaunchError: it is one of several processes that cannot join, and would each train separately.
    """
    for find in _SOURCES:
        member = find(environment)
        if member is not None:
            return member
    return None


def _from_elastic(environment: Mapping[str, str]) -> Member | None:
    """Read the variables that Kubernetes sets for torchrun, which count hosts."""
    hosts, rank = environment.get("PET_NNODES", "1"), environment.get("PET_NODE_RANK", "")
    if hosts == "1" or not (_is_number(hosts) and _is_number(rank)):
        if "PET_RDZV_ENDPOINT" in environment and hosts != "1":
            raise LaunchError(
                f"Kubernetes started this as one of PET_NNODES={hosts} processes without PET_NODE_RANK: an "
                "elastic PyTorchJob does not number its pods; remove elasticPolicy from the job"
            )
        return None
    address = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR")
    port = environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT")
    return _member(
        environment, int(rank), int(hosts), address, port, named=f"PET_NODE_RANK={rank}, PET_NNODES={hosts}"
    )


def _from_torch(environment: Mapping[str, str]) -> Member | None:
    """Read RANK and WORLD_SIZE, which count hosts if there is one process per host."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if not (_is_number(rank) and _is_number(size)) or int(size) <= 1:
        return None
    named = f"RANK={rank}, WORLD_SIZE={size}"
    if "TORCHELASTIC_RUN_ID" in environment:
        raise LaunchError(
            f"torchrun started this as one of {size} processes ({named}), and neox-launch starts the workers "
            "itself; run neox-launch instead of torchrun, once, or once per host"
        )
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    if local != "1" or environment.get("LOCAL_RANK", "0") != "0":
        raise _several_per_host(named, "one process per host")
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    return _member(environment, int(rank), int(size), address, port, named=named)


def _from_slurm(environment: Mapping[str, str]) -> Member | None:
    """Read the variables of a step; a batch script and an interactive shell are started once."""
    size, rank = environment.get("SLURM_STEP_NUM_TASKS", ""), environment.get("SLURM_PROCID", "")
    if not (_is_number(rank) and _is_number(size)) or int(size) <= 1 or "SLURM_PTY_PORT" in environment:
        return None
    named = f"SLURM_PROCID={rank}, SLURM_STEP_NUM_TASKS={size}"
    hosts = environment.get("SLURM_STEP_NUM_NODES", size)
    if hosts != size or environment.get("SLURM_LOCALID", "0") != "0":
        raise _several_per_host(named, "srun --ntasks-per-node=1")
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    names = tuple(expand_nodelist(listed))
    if len(names) != int(size):
        raise LaunchError(
            f"srun started this as one of {size} processes ({named}), but lists "
            f"{pluralize(len(names), 'host')} ({listed}); start one task per host (srun --ntasks-per-node=1)"
        )
    steps = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    number = sum(int(text) for text in steps if _is_number(text))
    port = environment.get("MASTER_PORT") or str(_SLURM_PORTS[number % len(_SLURM_PORTS)])
    address = environment.get("MASTER_ADDR") or names[0]
    return _member(environment, int(rank), int(size), address, port, named=named, names=names)


def _refuse_mpi(environment: Mapping[str, str]) -> None:
    for name in _MPI_SIZES:
        size = environment.get(name, "")
        if _is_number(size) and int(size) > 1:
            raise LaunchError(
                f"an MPI started this as one of {size} processes ({name}), each of which would train "
                "separately; start neox-launch once, without mpirun, and set launcher: openmpi, mpich or "
                "mvapich"
            )


_SOURCES: tuple[Callable[[Mapping[str, str]], Member | None], ...] = (
    _from_elastic,
    _from_torch,
    _from_slurm,
    _refuse_mpi,
)


def _member(
    environment: Mapping[str, str],
    rank: int,
    size: int,
    address: str | None,
    port: str | None,
    *,
    named: str,
    names: tuple[str, ...] = (),
) -> Member:
    started = f"a scheduler started this as one of {size:,} processes ({named})"
    alone = "; to launch from this process alone, unset these variables"
    if rank >= size or size > MOST_HOSTS:
        raise LaunchError(f"{started}, which cannot be right; correct or unset them")
    if not address:
        raise LaunchError(f"{started}, but MASTER_ADDR, the address of process 0, is not set; set it{alone}")
    if port is not None and not (_is_number(port) and 0 < int(port) < 65536):
        raise LaunchError(f"{started}, but MASTER_PORT={port} is not a port number; correct it")
    token = environment.get(TOKEN_VARIABLE, "")
    if len(token) < _SECRET_LENGTH or not token.isascii():
        what = "is not set" if not token else f"has fewer than {_SECRET_LENGTH} ASCII characters"
        raise LaunchError(
            f"{started}, which join each other with a shared secret, but {TOKEN_VARIABLE} {what}; set it to "
            f"one random value for all of them, for example export {TOKEN_VARIABLE}=$(openssl rand -hex 32) "
            f"before srun, or a Secret in Kubernetes ({_DOCUMENT}){alone}"
        )
    return Member(
        rank=rank,
        names=names or tuple(f"host-{number}" for number in range(size)),
        address=address,
        port=int(port or _DEFAULT_PORT),
        token=token,
        origin=f"the scheduler ({named})",
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER


def _several_per_host(named: str, remedy: str) -> LaunchError:
    return LaunchError(
        f"several processes of this program were started on each host ({named}), each of which would start "
        f"workers on all GPUs; neox-launch starts the workers itself: start it once, or once per host "
        f"({remedy})"
    )
