"""Which worker this process is, as its environment says."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from neox_launcher.errors import LaunchError

__all__ = ["MpiRank", "RankInfo", "read_mpi_rank", "read_rank", "refuse_mpi_by_hand"]

# (rank, number of ranks) as each kind of MPI tells them. Slurm's come last: inside an allocation they are set
# for mpirun too, and then say nothing of its ranks. A process manager that speaks PMIx leaves the number out.
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
    """One worker's place in the job.

    Args:
        rank: number of this worker in the whole job.
        local_rank: number of this worker on its host.
        world_size: workers in the job.
        local_world_size: workers on this host.
        master_addr: host where rank 0 listens.
        master_port: port where rank 0 listens.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiRank:
    """This process among those that an MPI started.

    Args:
        rank: its number.
        size: how many there are; None where the MPI does not say.
    """

    rank: int
    size: int | None


def read_rank(environment: Mapping[str, str] | None = None) -> RankInfo | None:
    """This process's place as `torch.distributed.run` tells it, or None when nothing started it as a worker.

    Args:
        environment: read instead of the process's own.
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
    )


def read_mpi_rank(environment: Mapping[str, str] | None = None) -> MpiRank:
    """This process's number as Open MPI, MVAPICH, MPICH, Intel MPI or Slurm tells it.

    Args:
        environment: read instead of the process's own.

    Raises:
        LaunchError: no MPI started this process.
    """
    env = os.environ if environment is None else environment
    for rank, size in _MPI_VARIABLES:
        if env.get(rank, "").isdigit():
            count = env.get(size, "")
            return MpiRank(rank=int(env[rank]), size=int(count) if count.isdigit() else None)
    names = ", ".join(name for name, _ in _MPI_VARIABLES)
    raise LaunchError(f"no MPI started this process: none of {names} is set to a number")


def refuse_mpi_by_hand(environment: Mapping[str, str] | None = None) -> None:
    """Stop the workers that `mpirun python -m neox_model.train` starts: each would train alone.

    Args:
        environment: read instead of the process's own.

    Raises:
        LaunchError: an MPI started this process as one of several, and nothing tells it its place.
    """
    env = os.environ if environment is None else environment
    sizes = [env.get(names[1], "") for names in _MPI_VARIABLES if names is not _SLURM]
    count = max((int(size) for size in sizes if size.isdigit()), default=1)
    if count > 1 and read_rank(env) is None:
        raise LaunchError(
            f"an MPI started this as one of {count:,} processes, each of which would train alone; let "
            "neox-launch start them, with deepspeed-mpi: true"
        )
