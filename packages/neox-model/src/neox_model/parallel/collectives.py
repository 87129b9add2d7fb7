"""The communications of tensor parallelism, each with its gradient, in pairs: one undoes the other's way.

Copy and reduce are f and g of arXiv:1909.08053. Gather-to and reduce-scatter-from do the same work where each
rank holds a part of the sequence (arXiv:2205.05198). In a group of one, each gives its argument back and
nothing is sent.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox_model.parallel.groups import Group
from neox_model.parallel.uncompiled import Uncompiled

__all__ = [
    "UNCOMPILED",
    "all_gather",
    "all_reduce",
    "copy_to_group",
    "gather_from_group",
    "gather_to_group",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_from_group",
    "scatter_to_group",
]

# Its name before torch 2.13 and since.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """`tensor` combined over the group, in place where its memory is contiguous; no gradient."""
    if group.size == 1:
        return tensor
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, op=op, group=group.process_group)
    return tensor


def all_gather(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """The ranks' tensors (of equal shapes) joined along `dim`, in rank order; no gradient."""
    if group.size == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return torch.cat(parts, dim=dim)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """This rank's rows (dimension 0, which the group divides) of the ranks' sum; no gradient."""
    if group.size == 1:
        return tensor
    rows = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    _reduce_scatter(rows, tensor.contiguous(), group=group.process_group)
    return rows


def _my_part(tensor: Tensor, group: Group, dim: int) -> Tensor:
    return tensor.chunk(group.size, dim=dim)[group.rank].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Cloned, because autograd may hand the same gradient to another branch.
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        # In place: the argument is a matrix product's fresh output, which no gradient needs.
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group.process_group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _my_part(gradient, ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _my_part(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.group, ctx.dim), None, None


class _GatherTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(tensor, group, dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient, ctx.group), None


class _ReduceScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, ctx.group, dim=0), None


_copy, _reduce = Uncompiled(_Copy.apply), Uncompiled(_Reduce.apply)
_gather, _scatter = Uncompiled(_Gather.apply), Uncompiled(_Scatter.apply)
_gather_to, _reduce_scatter_from = Uncompiled(_GatherTo.apply), Uncompiled(_ReduceScatterFrom.apply)
UNCOMPILED = (_copy, _reduce, _gather, _scatter, _gather_to, _reduce_scatter_from)


def copy_to_group(tensor: Tensor, group: Group) -> Tensor:
    """Hand a replicated tensor to split work: the same values, gradients summed over the group."""
    return tensor if group.size == 1 else _copy(tensor, group)


def reduce_from_group(tensor: Tensor, group: Group) -> Tensor:
    """Sum the ranks' partial results, in place; the gradient goes to every rank unchanged.

    `tensor` is overwritten: pass a result that nothing else holds, contiguous in memory.
    """
    return tensor if group.size == 1 else _reduce(tensor, group)


def gather_from_group(tensor: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Join the ranks' parts along `dim`; each rank keeps its own part of the gradient."""
    return tensor if group.size == 1 else _gather(tensor, group, dim)


def scatter_to_group(tensor: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Keep this rank's part of a replicated tensor along `dim`; the gradients' parts are joined."""
    return tensor if group.size == 1 else _scatter(tensor, group, dim)


def gather_to_group(tensor: Tensor, group: Group) -> Tensor:
    """Hand the ranks' rows, joined, to split work; each rank gets the summed gradients of its own rows."""
    return tensor if group.size == 1 else _gather_to(tensor, group)


def reduce_scatter_from_group(tensor: Tensor, group: Group) -> Tensor:
    """Sum the ranks' partial results and keep this rank's rows; the gradients of all rows are joined."""
    return tensor if group.size == 1 else _reduce_scatter_from(tensor, group)
