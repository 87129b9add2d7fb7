"""How a tensor of ours becomes one or several tensors of another program, and back.

Our query-key-value projection is ordered by group: the queries that share a key, the key, the value; then
the next group. Others store the three apart, or all queries before all keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from neox_config.spec.model import Attention

__all__ = [
    *("FUSED_QKV", "FUSED_QKV_TRANSPOSED", "ONE_PER_EXPERT", "SAME", "SEPARATE_QKV", "TRANSPOSED"),
    "Form",
]


@dataclass(frozen=True, slots=True)
class Form:
    """A transformation and its inverse; both only move elements, so that a round trip is exact.

    Args:
        to_theirs: our tensor -> theirs.
        to_ours: their tensors -> ours.
        is_same: nothing is moved, so that a part of the tensor can be converted alone.
        is_transposed: their matrices are stored as input by output.
        by_entry: each of theirs is an entry of ours, and each can be converted alone.
    """

    to_theirs: Callable[[Tensor, Attention], tuple[Tensor, ...]]
    to_ours: Callable[[tuple[Tensor, ...], Attention], Tensor]
    is_same: bool = False
    is_transposed: bool = False
    by_entry: bool = False

    def rows_to_theirs(self, matrix: Tensor, attention: Attention) -> tuple[Tensor, ...]:
        """Move the rows of a matrix of outputs by anything as the outputs of a weight are moved."""
        parts = self.to_theirs(matrix, attention)
        return tuple(part.t().contiguous() for part in parts) if self.is_transposed else parts


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor


def _split(tensor: Tensor, attention: Attention) -> tuple[Tensor, ...]:
    """Return the rows of all queries, all keys and all values."""
    sharing = attention.heads // attention.kv_heads
    groups = tensor.view(attention.kv_heads, sharing + 2, -1, *tensor.shape[1:])
    parts = groups[:, :sharing], groups[:, sharing : sharing + 1], groups[:, sharing + 1 :]
    return tuple(part.flatten(0, 2).contiguous() for part in parts)


def _join(tensors: tuple[Tensor, ...], attention: Attention) -> Tensor:
    """Return query, key and value rows ordered by group."""
    groups = [
        tensor.view(attention.kv_heads, -1, attention.head_width, *tensor.shape[1:]) for tensor in tensors
    ]
    return torch.cat(groups, dim=1).flatten(0, 2)


def _fuse(tensor: Tensor, attention: Attention) -> tuple[Tensor, ...]:
    return (torch.cat(_split(tensor, attention)),)


def _unfuse(tensors: tuple[Tensor, ...], attention: Attention) -> Tensor:
    sizes = [attention.query_width, attention.key_width, attention.key_width]
    return _join(tensors[0].split(sizes), attention)


SAME = Form(lambda ours, _: (ours,), lambda theirs, _: theirs[0], is_same=True)
TRANSPOSED = Form(
    lambda ours, _: (_transposed(ours),), lambda theirs, _: _transposed(theirs[0]), is_transposed=True
)
SEPARATE_QKV = Form(_split, _join)
# Our matrices of experts are stored as input by output.
ONE_PER_EXPERT = Form(
    lambda ours, _: tuple(each.t().contiguous() for each in ours),
    lambda theirs, _: torch.stack([each.t() for each in theirs]),
    by_entry=True,
)
# All queries, all keys, all values.
FUSED_QKV = Form(_fuse, _unfuse)
FUSED_QKV_TRANSPOSED = Form(
    lambda ours, attention: (_transposed(*_fuse(ours, attention)),),
    lambda theirs, attention: _unfuse((_transposed(theirs[0]),), attention),
    is_transposed=True,
)
