"""Which worker this process is, as its environment says."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RankInfo", "read_rank"]


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
