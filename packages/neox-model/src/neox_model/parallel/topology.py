"""Create the process groups of the axes of `neox_config.facts.topology`."""

from collections.abc import Sequence

import torch.distributed as dist

from neox_config.facts.topology import Topology
from neox_model.errors import LayoutError
from neox_model.parallel.groups import Group, Groups
from neox_model.torch_compat import limit_gloo_threads

__all__ = ["create_groups", "group_of_stages", "topology_of_world"]


def topology_of_world(
    world_size: int, *, model_parallel_size: int, pipe_parallel_size: int, expert_parallel_size: int = 1
) -> Topology:
    """Return the layout of `world_size` ranks; the data axis is the remaining factor.

    Raises:
        LayoutError: the sizes do not divide the world size.
    """
    slice_size = model_parallel_size * pipe_parallel_size
    if world_size % slice_size:
        raise LayoutError(
            f"model-parallel-size {model_parallel_size} x pipe-parallel-size {pipe_parallel_size} = "
            f"{slice_size} does not divide the {world_size:,} processes of this job; "
            "set sizes whose product divides the number of processes"
        )
    data = world_size // slice_size
    if data % expert_parallel_size:
        raise LayoutError(
            f"expert-parallel-size {expert_parallel_size} does not divide the {data} data-parallel ranks of "
            "this job; set it to a divisor"
        )
    return Topology(
        pipe=pipe_parallel_size, data=data, model=model_parallel_size, experts=expert_parallel_size
    )


def create_groups(model_parallel_size: int, pipe_parallel_size: int, expert_parallel_size: int = 1) -> Groups:
    """Form this job's groups; every rank must call it, with the same sizes, once torch.distributed runs.

    Args:
        model_parallel_size: tensor-parallel ranks per layer.
        pipe_parallel_size: pipeline stages, 1 for none.
        expert_parallel_size: data-parallel ranks that divide the experts.

    Raises:
        LayoutError: the sizes do not divide the world.
    """
    # A program may have formed the world's group itself.
    limit_gloo_threads()
    topology = topology_of_world(
        dist.get_world_size(),
        model_parallel_size=model_parallel_size,
        pipe_parallel_size=max(1, pipe_parallel_size),
        expert_parallel_size=expert_parallel_size,
    )
    everyone = tuple(range(topology.world_size))
    is_gloo = dist.get_backend() == "gloo"
    world = Group(dist.get_rank(), topology.world_size, dist.group.WORLD, everyone)
    return Groups(
        data=_join(topology.ranks_along("data")),
        model=_join(topology.ranks_along("model")),
        pipe=_join(topology.ranks_along("pipe")),
        world=world,
        control=Group(
            world.rank,
            world.size,
            dist.group.WORLD if is_gloo else dist.new_group(backend="gloo"),
            everyone,
        ),
        **_of_experts(topology),
    )


def _of_experts(topology: Topology) -> dict[str, Group]:
    """Return the groups of ranks that divide experts; empty if none do. Collective over all ranks."""
    if topology.experts == 1:
        return {}
    return {
        "experts": _join(topology.ranks_along("experts")),
        "expert_copies": _join(topology.ranks_along("copies")),
    }


def group_of_stages(groups: Groups, stages: Sequence[int]) -> dist.ProcessGroup | None:
    """Form the group of some stages of each pipeline; return this rank's. Collective over all ranks.

    Args:
        groups: this job's process groups.
        stages: the stages, in order.

    Returns:
        None on ranks of other stages.
    """
    if len(stages) == groups.pipe.size:
        return groups.pipe.process_group
    topology = Topology(pipe=groups.pipe.size, data=groups.data.size, model=groups.model.size)
    mine = None
    for ranks in topology.ranks_along("pipe"):
        members = [ranks[stage] for stage in stages]
        handle = dist.new_group(members)
        if groups.world.rank in members:
            mine = handle
    return mine


def _join(members: list[tuple[int, ...]]) -> Group:
    """Create all groups of one kind and return this rank's. Collective over all ranks."""
    rank = dist.get_rank()
    mine = None
    for ranks in members:
        handle = dist.group.WORLD if len(members) == 1 else dist.new_group(list(ranks))
        if rank in ranks:
            mine = Group(ranks.index(rank), len(ranks), handle, ranks)
    assert mine is not None, "every rank lies on each axis"
    return mine
