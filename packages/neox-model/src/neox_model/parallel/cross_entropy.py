"""Cross entropy over a vocabulary that is split over tensor-parallel ranks, in float32.

The forward pass keeps the logits as they came and one float32 number per token (the logarithm of the
softmax's denominator); the backward pass makes the softmax again. Both go through the tokens in blocks of
about half a million numbers, so that no float32 copy of all logits exists and a block stays in a CPU's
cache. Ranks exchange two numbers per token, once.
"""

from typing import Any

import torch
from torch import Tensor

from neox_model.parallel.collectives import all_gather
from neox_model.parallel.groups import SINGLE, Group

__all__ = ["local_vocabulary", "vocab_parallel_cross_entropy"]

_BLOCK_NUMBERS = 1 << 19


def local_vocabulary(vocab_size: int, group: Group) -> tuple[int, int]:
    """(start, stop): the entries of the vocabulary that this rank's columns of the logits stand for."""
    columns = -(-vocab_size // group.size)
    start = min(group.rank * columns, vocab_size)
    return start, min(start + columns, vocab_size)


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, group: Group = SINGLE
) -> Tensor:
    """Minus the logarithm of each label's probability, float32, the same on every rank of the group.

    Args:
        logits: [..., V], V being this rank's columns; those beyond `vocab_size` are as if minus infinity.
        labels: [...], ids below `vocab_size`.
        vocab_size: entries of the logical vocabulary.
        group: the ranks the vocabulary is split over; collective over it.

    Source: arXiv:1909.08053, section 3 (fusing the split output with the loss).
    """
    return _CrossEntropy.apply(logits, labels, vocab_size, group)


def _blocks(logits_MV: Tensor) -> range:
    return range(0, logits_MV.shape[0], _block_rows(logits_MV))


def _block_rows(logits_MV: Tensor) -> int:
    return max(1, _BLOCK_NUMBERS // max(1, logits_MV.shape[1]))


def _local_columns(labels_M: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Column of each label among this rank's, 0 where another rank has it, and which those are."""
    is_elsewhere = (labels_M < start) | (labels_M >= stop)
    return (labels_M - start).masked_fill(is_elsewhere, 0), is_elsewhere


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: Group) -> Tensor:
        start, stop = local_vocabulary(vocab_size, group)
        logits_MV = logits.reshape(-1, logits.shape[-1])
        log_total_M = torch.empty(len(logits_MV), device=logits.device, dtype=torch.float32)
        rows = _block_rows(logits_MV)
        for first in _blocks(logits_MV):
            block = logits_MV[first : first + rows, : stop - start].float()
            torch.logsumexp(block, dim=-1, out=log_total_M[first : first + rows])
        columns_M, is_elsewhere_M = _local_columns(labels.reshape(-1), start, stop)
        picked_M = logits_MV.gather(1, columns_M.unsqueeze(1)).squeeze(1).float()
        picked_M = picked_M.masked_fill(is_elsewhere_M, 0.0)
        if group.size > 1:
            # One exchange: each rank's part of the denominator and of the label's logit.
            parts = all_gather(torch.stack((log_total_M, picked_M)).unsqueeze(0), group, dim=0)
            log_total_M = parts[:, 0].logsumexp(dim=0)
            picked_M = parts[:, 1].sum(dim=0)
        ctx.save_for_backward(logits, log_total_M, columns_M, is_elsewhere_M)
        ctx.width = stop - start
        return (log_total_M - picked_M).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_total_M, columns_M, is_elsewhere_M = ctx.saved_tensors
        logits_MV = logits.reshape(-1, logits.shape[-1])
        result_MV = torch.empty_like(logits_MV)
        if ctx.width < logits_MV.shape[1]:
            result_MV[:, ctx.width :] = 0.0
        gradient_M1 = gradient.reshape(-1, 1).float()
        hit_M1 = torch.where(is_elsewhere_M.unsqueeze(1), 0.0, -gradient_M1)
        rows = _block_rows(logits_MV)
        for first in _blocks(logits_MV):
            part = slice(first, first + rows)
            softmax = torch.sub(logits_MV[part, : ctx.width], log_total_M[part].unsqueeze(1)).exp_()
            softmax *= gradient_M1[part]
            softmax.scatter_add_(1, columns_M[part].unsqueeze(1), hit_M1[part])
            result_MV[part, : ctx.width] = softmax
        return result_MV.view(logits.shape), None, None, None
