"""Process groups as arguments.

All modules below the assembly take a `Group` instead of querying torch.distributed. A group of one does not
communicate, so the same call builds a layer on one device and on eight.
"""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

__all__ = ["SINGLE_PROCESS", "SINGLE_RANK", "Group", "Groups", "part_length"]

# Parts start at whole bytes, and at addresses from which vector instructions can read: a sum does not depend
# on the place of its tensor in the message.
_PART_ALIGNMENT = 8


@dataclass(frozen=True)
class Group:
    """A process group, and this process's rank in it.

    Attributes:
        rank: this process's rank in the group, from 0.
        size: number of ranks.
        process_group: torch's process group; None only if torch.distributed is not used.
        ranks: global ranks of the members, in order.
        splits_sequence: between the split matrices each rank holds its part of the sequence instead of all of
            it (see parallel.sequence).
        keeps_gathered: keep the gathered inputs of split matrices for the backward pass instead of gathering
            them again; for layers that are recomputed, where they exist only during the backward pass, and
            for schedules that split the backward pass, which would gather them in both parts.
    """

    rank: int
    size: int
    process_group: ProcessGroup | None
    ranks: tuple[int, ...]
    splits_sequence: bool = False
    keeps_gathered: bool = False


SINGLE_RANK = Group(rank=0, size=1, process_group=None, ranks=(0,))


@dataclass(frozen=True)
class Groups:
    """All groups of one process.

    Attributes:
        data: replicas of the same part of the model.
        model: the ranks that share each layer's matrices (tensor parallelism).
        pipe: the stages of one pipeline.
        world: every rank.
        control: every rank, always over gloo: flags and messages on the CPU.
        experts: the replicas that divide the experts among each other (expert parallelism).
        expert_copies: the replicas with the same experts; None: all of `data`.
    """

    data: Group
    model: Group
    pipe: Group
    world: Group
    control: Group
    experts: Group = SINGLE_RANK
    expert_copies: Group | None = None

    def copies_of(self, *, is_expert: bool) -> Group:
        """Return the ranks with the same weight, between which its gradients are averaged."""
        return self.expert_copies if is_expert and self.expert_copies is not None else self.data


# The groups of a job with one process; torch.distributed need not be initialized.
SINGLE_PROCESS = Groups(
    data=SINGLE_RANK, model=SINGLE_RANK, pipe=SINGLE_RANK, world=SINGLE_RANK, control=SINGLE_RANK
)


def part_length(numel: int, ranks: int) -> int:
    """Return the number of elements in each rank's part of a tensor; the last parts may be shorter or empty.

    Args:
        numel: elements of the tensor.
        ranks: number of data-parallel ranks.
    """
    return -(-numel // (ranks * _PART_ALIGNMENT)) * _PART_ALIGNMENT
