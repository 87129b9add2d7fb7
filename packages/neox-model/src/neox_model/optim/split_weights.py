"""What optimizers compute of whole weights that tensor-parallel ranks split."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_gather, all_reduce

from neox_model.parallel.groups import Group
from neox_model.parallel.logical import split_dim_of
from neox_model.torch_compat import foreach_copy_

__all__ = ["joined_maxima_", "whole_norms", "whole_weight"]


def whole_norms(weights: Sequence[Tensor], norms: Tensor, group: Group) -> Tensor:
    """Return 2-norms over whole weights, given those over what this rank holds. Collective.

    Args:
        weights: each knows whether it is split; in the same order on each rank.
        norms: for each weight a row of norms.
        group: the tensor-parallel ranks.
    """
    split = [row for row, weight in enumerate(weights) if split_dim_of(weight) is not None]
    if not split:
        return norms
    # Summed in the order of the ranks: that of a reduction depends on the position among all the norms, so
    # copies of a weight on different pipeline stages would differ.
    squares = norms[split].square()
    parts = [torch.empty_like(squares) for _ in range(group.size)]
    all_gather(parts, squares, group=group.process_group)
    whole = norms.clone()
    whole[split] = torch.stack(parts).sum(dim=0).sqrt()
    return whole


def joined_maxima_(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace the elements of tensors by their maximum over the tensor-parallel ranks. Collective.

    Args:
        tensors: of the same shapes on each rank.
        group: the tensor-parallel ranks.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(flat, op=ReduceOp.MAX, group=group.process_group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def whole_weight(part: Tensor, dim: int, group: Group) -> Tensor:
    """Return the whole of what the tensor-parallel ranks hold equal parts of. Collective.

    Args:
        part: this rank's part.
        dim: the dimension that is split.
        group: the tensor-parallel ranks.
    """
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size)]
    all_gather(parts, part.contiguous(), group=group.process_group)
    return torch.cat(parts, dim)
