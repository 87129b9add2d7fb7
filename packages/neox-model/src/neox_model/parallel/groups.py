"""A process group as an argument: ranks that work on one thing together, and this process's place there.

Everything below the assembly takes a `Group` instead of asking torch.distributed. A group of one means no
communication, so a layer is built on one device and on eight by the same call.
"""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

__all__ = ["ALONE", "SINGLE", "Group", "Groups"]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, seen from one of them.

    Attributes:
        rank: this process's place in the group, from 0.
        size: number of ranks in it.
        process_group: torch's handle; None only where torch.distributed is not in use.
        ranks: global ranks of the members, in order.
        splits_sequence: between the split matrices each rank holds its part of the sequence, where it
            otherwise holds all of it (see parallel.sequence).
    """

    rank: int
    size: int
    process_group: ProcessGroup | None
    ranks: tuple[int, ...]
    splits_sequence: bool = False


@dataclass(frozen=True)
class Groups:
    """All the groups that one process belongs to.

    Attributes:
        data: replicas of the same part of the model.
        model: the ranks that share each layer's matrices (tensor parallelism).
        pipe: the stages of one pipeline.
        world: every rank.
        control: every rank, over gloo whatever the backend: flags and messages on the CPU.
    """

    data: Group
    model: Group
    pipe: Group
    world: Group
    control: Group


SINGLE = Group(rank=0, size=1, process_group=None, ranks=(0,))
# The groups of a process that nobody works with; torch.distributed need not be in use.
ALONE = Groups(data=SINGLE, model=SINGLE, pipe=SINGLE, world=SINGLE, control=SINGLE)
