"""Into split matrices and out of them, whether each rank holds the whole sequence between them or a part.

What lies between the split matrices (norms, dropout, residuals) is done by every tensor-parallel rank alike.
With a group that splits the sequence each rank does it for its own part: an all-reduce becomes a gather on
the way in and a reduce-scatter on the way out, which send as much, and the activations between take
1 / ranks of the memory. Parameters that every rank holds get their gradients summed (see
`logical_parameter`), and dropout differs between the ranks.

Source: arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from neox_model.parallel.collectives import (
    copy_to_group,
    gather_to_group,
    reduce_from_group,
    reduce_scatter_from_group,
)
from neox_model.parallel.groups import Group
from neox_model.parallel.random import in_split_stream, split_stream

__all__ = ["BiasDropoutAdd", "enter_split", "leave_split", "own_rows", "sequence_stream", "with_own_dropout"]

# (x, bias or None, residual, probability, training) -> residual + dropout(x + bias)
BiasDropoutAdd = Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor]


def enter_split(hidden: Tensor, group: Group) -> Tensor:
    """What a matrix split by columns multiplies: the whole sequence (dimension 0), gradients summed."""
    return gather_to_group(hidden, group) if group.splits_sequence else copy_to_group(hidden, group)


def leave_split(partial_sums: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' partial results; this rank's part of the sequence where the group splits it.

    `partial_sums` may be overwritten: pass a result that nothing else holds, contiguous in memory.
    """
    if group.splits_sequence:
        return reduce_scatter_from_group(partial_sums, group)
    return reduce_from_group(partial_sums, group)


def own_rows(tensor: Tensor, group: Group) -> Tensor:
    """This rank's part (dimension 0) of something that every rank has whole and that needs no gradient."""
    return tensor.chunk(group.size)[group.rank] if group.splits_sequence else tensor


@contextmanager
def sequence_stream(group: Group, device: torch.device) -> Iterator[None]:
    """Within, random numbers differ between ranks that hold different parts of the sequence."""
    if not group.splits_sequence:
        yield
        return
    with split_stream(group, device):
        yield


def with_own_dropout(add: BiasDropoutAdd, group: Group) -> BiasDropoutAdd:
    """`add`, dropping other numbers on each rank where the group splits the sequence."""
    return partial(_add_with_own_dropout, add, group) if group.splits_sequence else add


def _add_with_own_dropout(
    add: BiasDropoutAdd,
    group: Group,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    probability: float,
    training: bool,
) -> Tensor:
    if not training or probability == 0.0:
        return add(x, bias, residual, probability, training)
    return in_split_stream(group, x.device, partial(add, x, bias, residual, probability, training))
