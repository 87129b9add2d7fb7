"""Enter and leave split matrices, with or without sequence parallelism.

Every tensor-parallel rank computes the layers between split matrices (norms, dropout, residuals). With a
group that splits the sequence, each rank computes them for its part only: an all-gather before and a
reduce-scatter after the split matrices replace the all-reduce, with the same amount of communication, and the
activations in between take 1 / ranks of the memory. Gradients of parameters that every rank holds are summed
(see `logical_parameter`), and dropout differs between the ranks.

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

__all__ = [
    "BiasDropoutAdd",
    "from_row_parallel",
    "own_rows",
    "sequence_stream",
    "to_column_parallel",
    "with_own_dropout",
]

# (x, bias or None, residual, probability, training) -> residual + dropout(x + bias)
BiasDropoutAdd = Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor]


def to_column_parallel(hidden: Tensor, group: Group) -> Tensor:
    """Return the input of a column-parallel matrix: the whole sequence (dimension 0), gradients summed."""
    return gather_to_group(hidden, group) if group.splits_sequence else copy_to_group(hidden, group)


def from_row_parallel(partial_sums: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' partial results, only this rank's part if the group splits the sequence.

    `partial_sums` may be overwritten: pass a contiguous tensor that nothing else references.
    """
    if group.splits_sequence:
        return reduce_scatter_from_group(partial_sums, group)
    return reduce_from_group(partial_sums, group)


def own_rows(tensor: Tensor, group: Group) -> Tensor:
    """Return this rank's part (dimension 0) of a replicated tensor without gradient."""
    return tensor.chunk(group.size)[group.rank] if group.splits_sequence else tensor


@contextmanager
def sequence_stream(group: Group, device: torch.device) -> Iterator[None]:
    """Within this context, random numbers differ between ranks with different parts of the sequence."""
    if not group.splits_sequence:
        yield
        return
    with split_stream(group, device):
        yield


def with_own_dropout(add: BiasDropoutAdd, group: Group) -> BiasDropoutAdd:
    """Return `add` with different dropout on each rank if the group splits the sequence."""
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
