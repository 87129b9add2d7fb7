"""Parameters that know which part of which whole tensor they hold.

A model has one set of logical tensors (`layers.12.attention.qkv.weight`), whatever the layout. A rank's
parameter carries, as `param.logical`, the whole shape, the block it holds, and how the whole is first
filled; initialisation, checkpoints and optimizers need nothing else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from neox_model.errors import LayoutError
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import SINGLE, Group

__all__ = ["InitMethod", "Logical", "logical_parameter", "named_logical_parameters"]

InitMethod = Callable[[Tensor, torch.Generator], None]


@dataclass(frozen=True)
class Logical:
    """What a parameter is a part of.

    Attributes:
        shape: the whole tensor's, without padding.
        slices: the block this rank holds, (start, stop) per dimension, clipped to `shape`. The local tensor
            may be longer along the split dimension: the rows beyond are zero, masked wherever used, and
            never stored.
        init: fills the whole float32 tensor in place from a generator.
        model_parallel: whether the tensor is split over tensor-parallel ranks.
    """

    shape: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]
    init: InitMethod
    model_parallel: bool


def logical_parameter(
    shape: tuple[int, ...],
    *,
    init: InitMethod,
    group: Group = SINGLE,
    split_dim: int | None = None,
    pad: bool = False,
) -> nn.Parameter:
    """This rank's part of a logical tensor, memory allocated and not filled.

    Args:
        shape: the whole tensor's shape.
        init: fills the whole tensor.
        group: the ranks it is split over.
        split_dim: the dimension that is split; None for a copy on every rank. A copy with a group that splits
            the sequence is used on each rank's part of it: its gradients are summed over the group.
        pad: let the last ranks hold rows beyond the whole instead of refusing sizes that do not divide.

    Raises:
        LayoutError: the split dimension does not divide by the group and `pad` is off.
    """
    local_shape = list(shape)
    slices = [(0, length) for length in shape]
    if split_dim is not None:
        length = shape[split_dim]
        if length % group.size and not pad:
            raise LayoutError(
                f"a width of {length:,} cannot be split over {group.size} tensor-parallel ranks; "
                f"choose a model-parallel-size that divides it"
            )
        local = -(-length // group.size)
        start = min(group.rank * local, length)
        local_shape[split_dim] = local
        slices[split_dim] = (start, min(start + local, length))
    parameter = nn.Parameter(torch.empty(local_shape))
    is_split = split_dim is not None and group.size > 1
    parameter.logical = Logical(tuple(shape), tuple(slices), init, is_split)  # type: ignore[attr-defined]
    if is_split:
        # DeepSpeed's norms: sum this parameter over ranks instead of counting it once.
        parameter.model_parallel = True  # type: ignore[attr-defined]
    if split_dim is None and group.splits_sequence:
        parameter.register_hook(partial(_sum_gradients, group))
    return parameter


def _sum_gradients(group: Group, gradient: Tensor) -> Tensor:
    # Cloned, because autograd may hand the same gradient to another branch.
    return all_reduce(gradient.clone(memory_format=torch.contiguous_format), group)


def named_logical_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(logical name, parameter) of each parameter this rank holds, tied ones once, under their owner's name.

    A built model has `plan_names`, which says for each path of its own which logical name it has (an empty
    dict, or none at all, where both are the same).
    """
    renamed: dict[str, str] = getattr(model, "plan_names", {})
    for path, parameter in model.named_parameters():
        yield _logical_name(path, renamed), parameter


def _logical_name(path: str, renamed: dict[str, str]) -> str:
    """`path` with its longest known prefix replaced: by {"3": "layers.2"}, "3.norm1.bias" has layers.2."""
    prefix = path
    while prefix:
        if prefix in renamed:
            return renamed[prefix] + path[len(prefix) :]
        prefix = prefix.rpartition(".")[0]
    return path
