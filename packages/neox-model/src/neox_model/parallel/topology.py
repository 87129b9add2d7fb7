"""Which ranks form which group, and their creation.

Ranks are laid out on the axes (pipe, data, model), the last one fastest: tensor parallelism talks most, so
its ranks are neighbours on one host. DeepSpeed's own grid (`PipeModelDataParallelTopology`) has the same
order.
"""

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from neox_model.errors import LayoutError
from neox_model.parallel.groups import Group, Groups

__all__ = ["Topology", "create_groups"]

_AXES = {"pipe": 0, "data": 1, "model": 2}


@dataclass(frozen=True)
class Topology:
    """Sizes of the three axes; `pipe * data * model` ranks in all."""

    pipe: int
    data: int
    model: int

    @classmethod
    def of_world(cls, world_size: int, *, model_parallel_size: int, pipe_parallel_size: int) -> "Topology":
        """The layout of `world_size` ranks, the data axis being what the other two leave.

        Raises:
            LayoutError: the sizes do not divide the world.
        """
        slice_size = model_parallel_size * pipe_parallel_size
        if world_size % slice_size:
            raise LayoutError(
                f"model-parallel-size {model_parallel_size} x pipe-parallel-size {pipe_parallel_size} = "
                f"{slice_size} does not divide the {world_size:,} processes of this job; "
                "choose sizes whose product divides them"
            )
        return cls(pipe=pipe_parallel_size, data=world_size // slice_size, model=model_parallel_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipe * self.data * self.model

    def ranks_along(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of ranks that differ in one axis ("pipe", "data" or "model") only."""
        grid = np.arange(self.world_size).reshape(self.pipe, self.data, self.model)
        lines = np.moveaxis(grid, _AXES[axis], -1).reshape(-1, grid.shape[_AXES[axis]])
        return [tuple(int(rank) for rank in line) for line in lines]


def create_groups(model_parallel_size: int, pipe_parallel_size: int) -> Groups:
    """Form this job's groups; every rank must call it, with the same sizes, once torch.distributed runs.

    Args:
        model_parallel_size: tensor-parallel ranks per layer.
        pipe_parallel_size: pipeline stages, 1 for none.

    Raises:
        LayoutError: the sizes do not divide the world.
    """
    topology = Topology.of_world(
        dist.get_world_size(),
        model_parallel_size=model_parallel_size,
        pipe_parallel_size=max(1, pipe_parallel_size),
    )
    everyone = tuple(range(topology.world_size))
    world = Group(dist.get_rank(), topology.world_size, dist.group.WORLD, everyone)
    return Groups(
        data=_join(topology.ranks_along("data")),
        model=_join(topology.ranks_along("model")),
        pipe=_join(topology.ranks_along("pipe")),
        world=world,
        control=Group(world.rank, world.size, _control_process_group(), everyone),
    )


def _join(members: list[tuple[int, ...]]) -> Group:
    """Form all groups of one kind (a collective call) and give the one this rank is in."""
    rank = dist.get_rank()
    mine = None
    for ranks in members:
        handle = dist.group.WORLD if len(members) == 1 else dist.new_group(list(ranks))
        if rank in ranks:
            mine = Group(ranks.index(rank), len(ranks), handle, ranks)
    assert mine is not None, "every rank lies on each axis"
    return mine


def _control_process_group() -> dist.ProcessGroup | None:
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    return dist.new_group(backend="gloo")
