"""Reads the rank of this process from its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from neox_config.errors import LaunchError

__all__ = [
    "STORE_SOCKET_VARIABLE",
    "TORCHRUN_STORE_VARIABLE",
    "RankInfo",
    "read_mpi_rank",
    "read_rank",
    "refuse_mpi_by_hand",
]

STORE_SOCKET_VARIABLE = "NEOX_STORE_SOCKET"
"""Variable with the file descriptor of rank 0's listening socket at MASTER_PORT, opened by its agent."""

TORCHRUN_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that torchrun sets for its workers, which join over a store of its agent."""

# (rank, number of ranks) as set by each kind of MPI. Slurm's come last: inside an allocation they are also
# set for mpirun, but not for its ranks. Process managers that use PMIx do not set the number.
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS")
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("MPI_RANKID", "MPI_NRANKS"),
    _SLURM,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Place of one worker in the job.

    Args:
        rank: global rank.
        local_rank: rank on its host.
        world_size: number of workers in the job.
        local_world_size: number of workers on its host.
        master_addr: address of rank 0.
        master_port: port of rank 0.
        store_socket: file descriptor of rank 0's listening socket; None on other ranks, and if rank 0 was not
            started by an agent and opens the socket itself.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    store_socket: int | None = None


def read_rank(environment: Mapping[str, str] | None = None) -> RankInfo | None:
    """Read the place of this process from torchrun's variables; return None if it is not a worker.

    Args:
        environment: used instead of the environment of this process.
    """
    env = os.environ if environment is None else environment
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    return RankInfo(
        rank=int(env["RANK"]),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=int(env["WORLD_SIZE"]),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(env.get("MASTER_PORT", "29500")),
        store_socket=int(env[STORE_SOCKET_VARIABLE]) if STORE_SOCKET_VARIABLE in env else None,
    )


def read_mpi_rank(environment: Mapping[str, str] | None = None) -> int:
    """Read the rank of this process as set by Open MPI, MVAPICH, MPICH, Intel MPI or Slurm.

    Args:
        environment: used instead of the environment of this process.

    Raises:
        LaunchError: this process was not started by MPI.
    """
    env = os.environ if environment is None else environment
    for rank, _ in _MPI_VARIABLES:
        if env.get(rank, "").isdigit():
            return int(env[rank])
    names = ", ".join(name for name, _ in _MPI_VARIABLES)
    raise LaunchError(
        f"this process was not started by MPI: none of {names} is set to a number", code="no-mpi"
    )


def refuse_mpi_by_hand(environment: Mapping[str, str] | None = None) -> None:
    """Refuse processes started by `mpirun python -m neox_model.train`: each would train separately.

    Args:
        environment: used instead of the environment of this process.

    Raises:
        LaunchError: this process is one of several started by MPI, and torchrun's variables are not set.
    """
    env = os.environ if environment is None else environment
    sizes = [env.get(names[1], "") for names in _MPI_VARIABLES if names is not _SLURM]
    count = max((int(size) for size in sizes if size.isdigit()), default=1)
    if count > 1 and read_rank(env) is None:
        raise LaunchError(
            f"an MPI started this as one of {count:,} processes, each of which would train separately; start "
            "them with neox-launch and deepspeed-mpi: true",
            code="mpi-by-hand",
        )
