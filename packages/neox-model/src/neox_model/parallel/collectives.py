"""Collectives of tensor parallelism, with gradients.

They come in pairs whose forward and backward passes are exchanged. Copy and reduce are f and g of
arXiv:1909.08053. Gather-to and reduce-scatter-from replace them if each rank holds a part of the sequence
(arXiv:2205.05198). In a group of one, each returns its argument without communication.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox_model.parallel.compile_disabled import CompileDisabled
from neox_model.parallel.groups import Group
from neox_model.torch_compat import all_gather_single, reduce_scatter_single

__all__ = [
    "COMPILE_DISABLED",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_to_group",
    "exchange_rows",
    "gather_from_group",
    "gather_to_group",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_from_group",
    "scatter_to_group",
    "start_all_gather",
    "summed_copy",
]


def all_reduce(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a tensor over the group, in place if its memory is contiguous; no gradient."""
    if group.size == 1:
        return tensor
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, op=op, group=group.process_group)
    return tensor


def all_gather(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenate the ranks' tensors (of equal shapes) along `dim`, in rank order; no gradient."""
    if group.size == 1:
        return tensor
    # Rank by rank in one tensor: for dimension 0 this is the result, for others it is copied once.
    parts = tensor.new_empty((group.size, *tensor.shape))
    all_gather_single(parts.flatten(0, 1), tensor.contiguous(), group=group.process_group)
    dim %= tensor.ndim
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def all_to_all(tensor: Tensor, group: Group) -> Tensor:
    """Send row i to rank i of the group, and return the rows that ranks sent, in their order; no gradient."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor.contiguous(), group=group.process_group)
    return received


def start_all_gather(rows: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to concatenate the ranks' rows; return a function that waits and returns them. No gradient."""
    whole = rows.new_empty((group.size * rows.shape[0], *rows.shape[1:]))
    work = all_gather_single(whole, rows.contiguous(), group=group.process_group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return whole

    return wait


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of the sum over ranks; no gradient. The group must divide dimension 0."""
    if group.size == 1:
        return tensor
    rows = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    reduce_scatter_single(rows, tensor.contiguous(), group=group.process_group)
    return rows


def _my_part(tensor: Tensor, group: Group, dim: int) -> Tensor:
    return tensor.chunk(group.size, dim=dim)[group.rank].contiguous()


def summed_copy(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum over the group of a gradient, which autograd may pass to another branch as well."""
    return all_reduce(tensor.clone(memory_format=torch.contiguous_format), group)


def _send_rows(rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group.process_group)
    return arrived


def _return_rows(rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    return _send_rows(rows, group, received, sent)


def _same(tensor: Tensor, group: Group) -> Tensor:
    return tensor.view_as(tensor)


def _all_rows(tensor: Tensor, group: Group) -> Tensor:
    return all_gather(tensor, group, dim=0)


class _Exchange(torch.autograd.Function):
    """A function of (tensor, group, ...), and that of its gradient and the same group."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *places: Any
    ) -> Tensor:
        ctx.back, ctx.places = back, places
        return there(tensor, *places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient, *ctx.places), None, None, *(None for _ in ctx.places)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        # In place: the argument is the output of a matrix product, which no gradient needs.
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group.process_group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


_exchange, _reduce = CompileDisabled(_Exchange.apply), CompileDisabled(_Reduce.apply)
COMPILE_DISABLED = (_exchange, _reduce)


def copy_to_group(tensor: Tensor, group: Group) -> Tensor:
    """Return a replicated tensor unchanged; its gradients are summed over the group."""
    return tensor if group.size == 1 else _exchange(tensor, _same, summed_copy, group)


def reduce_from_group(tensor: Tensor, group: Group) -> Tensor:
    """Sum the ranks' partial results, in place; every rank receives the gradient unchanged.

    `tensor` is overwritten: pass a contiguous tensor that nothing else references.
    """
    return tensor if group.size == 1 else _reduce(tensor, group)


def gather_from_group(tensor: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Concatenate the ranks' parts along `dim`; each rank receives its part of the gradient."""
    return tensor if group.size == 1 else _exchange(tensor, all_gather, _my_part, group, dim)


def scatter_to_group(tensor: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Return this rank's part of a replicated tensor along `dim`; gradients are concatenated."""
    return tensor if group.size == 1 else _exchange(tensor, _my_part, all_gather, group, dim)


def gather_to_group(tensor: Tensor, group: Group) -> Tensor:
    """Concatenate the ranks' rows; each rank receives the summed gradients of its rows."""
    return tensor if group.size == 1 else _exchange(tensor, _all_rows, reduce_scatter, group)


def reduce_scatter_from_group(tensor: Tensor, group: Group) -> Tensor:
    """Sum the ranks' partial results and return this rank's rows; gradients are concatenated."""
    return tensor if group.size == 1 else _exchange(tensor, reduce_scatter, _all_rows, group)


def exchange_rows(rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send runs of rows to the ranks, and return those that they sent; gradients go back.

    Args:
        rows: the rows for the first rank, then those for the second, and so on.
        group: the ranks.
        sent: number of rows for each rank.
        received: number of rows from each rank.
    """
    return rows if group.size == 1 else _exchange(rows, _send_rows, _return_rows, group, sent, received)
