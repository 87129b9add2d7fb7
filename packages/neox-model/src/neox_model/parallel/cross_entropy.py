"""Cross entropy over a vocabulary that is split over tensor-parallel ranks, in float32.

The z-loss is a coefficient times log_total^2, where log_total is the logarithm of the denominator (natural);
d logit_v = 2 * coefficient * log_total * softmax_v.

From logits: the forward pass stores the logits in their dtype and one number per token (the logarithm of the
softmax's denominator); the backward pass recomputes the softmax. Both process the tokens in blocks, so that
no float32 copy of all logits exists; on a CPU a block fits in the cache.

From hidden states: logits exist for one chunk of tokens at a time, and are computed once. The forward pass
computes both gradients with them, and the backward pass multiplies these by the gradient of the loss. With
50,304 entries and 2,048 tokens of float32 the logits and their gradient would take 824 MB.

Ranks exchange two numbers per token, once.

Source: arXiv:1909.08053, section 3 (fusing the split output with the loss).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from neox_config.facts.loss import BLOCK_NUMBERS, CHUNK_NUMBERS
from neox_model.parallel.collectives import all_gather
from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = [
    "LossOperator",
    "chunk_rows_on",
    "local_vocabulary",
    "projected_cross_entropy",
    "vocab_parallel_cross_entropy",
]

# neox_kernels.cross_entropy: logits, labels, weights, totals, width -> totals, logits of labels, logits.
LossOperator = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, int], tuple[Tensor, Tensor, Tensor]]


def local_vocabulary(vocab_size: int, group: Group) -> tuple[int, int]:
    """Return (start, stop), the vocabulary entries of this rank's columns of the logits."""
    columns = -(-vocab_size // group.size)
    start = min(group.rank * columns, vocab_size)
    return start, min(start + columns, vocab_size)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: Group = SINGLE_RANK,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of each label and the logarithm of the softmax's denominator, on every rank.

    Args:
        logits: [..., V], where V are this rank's columns; those beyond `vocab_size` count as minus infinity.
        labels: [...], ids below `vocab_size`.
        vocab_size: size of the logical vocabulary.
        group: the ranks over which the vocabulary is split; collective over it.
        dtype: dtype of the computation and the result; None: float32, or float64 for float64 logits.
    """
    dtype = dtype or torch.promote_types(logits.dtype, torch.float32)
    found: tuple[Tensor, Tensor] = _CrossEntropy.apply(
        logits, labels, _Vocabulary.of(vocab_size, group, dtype)
    )
    return found


def projected_cross_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    *,
    vocab_size: int,
    group: Group = SINGLE_RANK,
    chunk_rows: int | None = None,
    keeps_gradients: bool = False,
    operator: LossOperator | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    z_terms: list[Tensor] | None = None,
) -> Tensor:
    """Return the weighted sum of the tokens' cross entropies, float32; logits are `hidden_MD @ weight_VD.T`.

    Gradients are computed in the dtype of the two factors before the loss is scaled, so float16 is not
    supported: its small gradients would underflow.

    Args:
        hidden_MD: the last hidden states of M tokens, the same on every rank; their gradient is this rank's
            part of a sum over the group.
        weight_VD: this rank's rows of the output matrix.
        labels_M: ids below `vocab_size`.
        weights_M: weight of each token, float32; no gradient.
        vocab_size: size of the logical vocabulary.
        group: the ranks over which the vocabulary is split; collective over it.
        chunk_rows: tokens per chunk of logits; None chooses by the device.
        keeps_gradients: allow several backward passes, of the same gradient, as schedules that compute the
            gradients of weights apart make; the weight's gradient stays in memory until the last one.
        operator: computes loss and gradient of a chunk; None: PyTorch's operators.
        softcap: the logits are `softcap * tanh(product / softcap)`, in float32; None: they are the product.
        z_loss: the gradient is that of the sum and of `z_loss` times the weighted sum of the squared
            logarithms of the softmax's denominators.
        z_terms: this term is added to the list, if there is a gradient; the returned value does not have it.
    """
    if chunk_rows is None:
        chunk_rows = chunk_rows_on(hidden_MD.device, weight_VD.shape[0])
    dtype = torch.promote_types(hidden_MD.dtype, torch.float32)
    vocabulary = _Vocabulary.of(vocab_size, group, dtype, operator, softcap=softcap, z_loss=z_loss)
    needs_gradients = torch.is_grad_enabled() and (hidden_MD.requires_grad or weight_VD.requires_grad)
    total, of_z = _ProjectedCrossEntropy.apply(
        hidden_MD, weight_VD, labels_M, weights_M, vocabulary, chunk_rows, needs_gradients, keeps_gradients
    )
    if z_loss and needs_gradients and z_terms is not None:
        z_terms.append(of_z)
    return total


def chunk_rows_on(device: torch.device, columns: int) -> int:
    """Return how many tokens a chunk of the logits has, for this rank's columns."""
    return _rows(CHUNK_NUMBERS, device, columns)


def _rows(numbers: Mapping[str, int], device: torch.device, columns: int) -> int:
    return max(1, numbers.get(device.type, numbers["cuda"]) // max(1, columns))


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """This rank's entries [start, stop) of a vocabulary, and how the loss is computed."""

    start: int
    stop: int
    group: Group
    dtype: torch.dtype
    operator: LossOperator | None = None
    softcap: float | None = None
    z_loss: float = 0.0

    @classmethod
    def of(
        cls, vocab_size: int, group: Group, dtype: torch.dtype, *rest: Any, **options: Any
    ) -> "_Vocabulary":
        return cls(*local_vocabulary(vocab_size, group), group, dtype, *rest, **options)

    @property
    def width(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Labels:
    """Each label's column on this rank (0 if another rank has it), and a mask of labels on other ranks."""

    columns: Tensor
    is_elsewhere: Tensor

    def marked(self) -> Tensor:
        """Return the columns with -1 for labels on other ranks."""
        return self.columns.masked_fill(self.is_elsewhere, -1)

    @classmethod
    def within(cls, labels_M: Tensor, vocabulary: _Vocabulary) -> "_Labels":
        is_elsewhere = (labels_M < vocabulary.start) | (labels_M >= vocabulary.stop)
        return cls((labels_M - vocabulary.start).masked_fill(is_elsewhere, 0), is_elsewhere)


def _blocks(logits_MV: Tensor) -> list[slice]:
    rows = _rows(BLOCK_NUMBERS, logits_MV.device, logits_MV.shape[1])
    return [slice(first, first + rows) for first in range(0, len(logits_MV), rows)]


def _log_totals(logits_MV: Tensor, labels: _Labels, vocabulary: _Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the softmax's denominator and the label's logit of each token."""
    if vocabulary.operator is None:
        log_total_M, picked_M = _log_totals_here(logits_MV, labels, vocabulary)
    else:
        log_total_M, picked_M, _ = vocabulary.operator(
            logits_MV, labels.marked(), None, None, vocabulary.width
        )
    if vocabulary.group.size > 1:
        # One all-gather for each rank's part of the denominator and of the label's logit.
        mine = torch.stack((log_total_M, picked_M)).unsqueeze(0)
        parts = all_gather(mine, vocabulary.group, dim=0)
        log_total_M, picked_M = parts[:, 0].logsumexp(dim=0), parts[:, 1].sum(dim=0)
    return log_total_M, picked_M


def _log_totals_here(logits_MV: Tensor, labels: _Labels, vocabulary: _Vocabulary) -> tuple[Tensor, Tensor]:
    """Return `_log_totals` of this rank's columns."""
    log_total_M = torch.empty(len(logits_MV), device=logits_MV.device, dtype=vocabulary.dtype)
    for part in _blocks(logits_MV):
        block = logits_MV[part, : vocabulary.width].to(vocabulary.dtype)
        torch.logsumexp(block, dim=-1, out=log_total_M[part])
    picked_M = logits_MV.gather(1, labels.columns.unsqueeze(1)).squeeze(1).to(vocabulary.dtype)
    return log_total_M, picked_M.masked_fill(labels.is_elsewhere, 0.0)


def _gradient_of_logits(
    result_MV: Tensor,
    logits_MV: Tensor,
    log_total_M: Tensor,
    labels: _Labels,
    gradient_M: Tensor,
    vocabulary: _Vocabulary,
    of_totals_M: Tensor | None = None,
) -> None:
    """Write gradient * (softmax - 1 at the label) to `result_MV`, which may be the logits.

    `of_totals_M` is the gradient of the logarithms of the denominators themselves: it adds itself * softmax.
    """
    result_MV[:, vocabulary.width :] = 0.0
    gradient_M1 = gradient_M.to(vocabulary.dtype).unsqueeze(1)
    hit_M1 = torch.where(labels.is_elsewhere.unsqueeze(1), 0.0, -gradient_M1)
    if of_totals_M is not None:
        gradient_M1 = gradient_M1 + of_totals_M.unsqueeze(1)
    for part in _blocks(logits_MV):
        softmax = torch.sub(logits_MV[part, : vocabulary.width], log_total_M[part].unsqueeze(1)).exp_()
        softmax *= gradient_M1[part]
        softmax.scatter_add_(1, labels.columns[part].unsqueeze(1), hit_M1[part])
        result_MV[part, : vocabulary.width] = softmax


def _loss_and_gradient(
    logits_CV: Tensor, labels: _Labels, weights_C: Tensor, vocabulary: _Vocabulary
) -> Tensor:
    """Return the cross entropies, and overwrite the logits with weights * (softmax - 1 at the label)."""
    if vocabulary.operator is not None:
        return _fused_loss_and_gradient(vocabulary.operator, logits_CV, labels, weights_C, vocabulary)
    if vocabulary.group.size > 1:
        log_total_C, picked_C = _log_totals(logits_CV, labels, vocabulary)
        _gradient_of_logits(logits_CV, logits_CV, log_total_C, labels, weights_C, vocabulary)
        return log_total_C - picked_C
    # Rows are whole, so each block computes loss and gradient with one exponential per logit.
    return torch.cat(
        [
            _loss_and_gradient_of_rows(logits_CV[part], labels.columns[part], weights_C[part], vocabulary)
            for part in _blocks(logits_CV)
        ]
    )


def _fused_loss_and_gradient(
    operator: LossOperator, logits_CV: Tensor, labels: _Labels, weights_C: Tensor, vocabulary: _Vocabulary
) -> Tensor:
    weights_C = weights_C.to(vocabulary.dtype)
    if vocabulary.group.size == 1:
        log_total_C, picked_C, _ = operator(logits_CV, labels.marked(), weights_C, None, vocabulary.width)
    else:
        log_total_C, picked_C = _log_totals(logits_CV, labels, vocabulary)
        operator(logits_CV, labels.marked(), weights_C, log_total_C, vocabulary.width)
    return log_total_C - picked_C


def _loss_and_gradient_of_rows(
    logits_CV: Tensor, columns_C: Tensor, weights_C: Tensor, vocabulary: _Vocabulary
) -> Tensor:
    columns_C1, weights_C1 = columns_C.unsqueeze(1), weights_C.to(vocabulary.dtype).unsqueeze(1)
    logits_CV[:, vocabulary.width :] = 0.0
    # A view of the logits if they already have this dtype.
    softmax_CV = logits_CV[:, : vocabulary.width].to(vocabulary.dtype)
    picked_C1 = softmax_CV.gather(1, columns_C1)
    largest_C1 = softmax_CV.amax(dim=-1, keepdim=True)
    total_C1 = softmax_CV.sub_(largest_C1).exp_().sum(dim=-1, keepdim=True)
    softmax_CV.mul_(weights_C1 / total_C1).scatter_add_(1, columns_C1, -weights_C1)
    if softmax_CV.dtype != logits_CV.dtype:
        logits_CV[:, : vocabulary.width] = softmax_CV
    return (largest_C1 + total_C1.log() - picked_C1).squeeze(1)


def _loss_and_gradient_with_z(
    logits_CV: Tensor, labels: _Labels, weights_C: Tensor, vocabulary: _Vocabulary
) -> tuple[Tensor, Tensor]:
    """Return the cross entropies and the z-losses; overwrite the logits with the gradient of both."""
    log_total_C, picked_C = _log_totals(logits_CV, labels, vocabulary)
    weights_C = weights_C.to(vocabulary.dtype)
    of_totals_C = 2 * vocabulary.z_loss * log_total_C * weights_C
    if vocabulary.operator is None:
        _gradient_of_logits(logits_CV, logits_CV, log_total_C, labels, weights_C, vocabulary, of_totals_C)
    else:
        factors_C, none_C = weights_C + of_totals_C, torch.full_like(labels.columns, -1)
        vocabulary.operator(logits_CV, none_C, factors_C, log_total_C, vocabulary.width)
        # At the label once more, unrounded: the operator has one weight for the softmax and the label.
        at_label_C = factors_C * torch.exp(picked_C - log_total_C) - weights_C
        columns_C1 = labels.columns.unsqueeze(1)
        written_C1 = logits_CV.gather(1, columns_C1)
        at_label_C1 = at_label_C.to(logits_CV.dtype).unsqueeze(1)
        logits_CV.scatter_(
            1, columns_C1, torch.where(labels.is_elsewhere.unsqueeze(1), written_C1, at_label_C1)
        )
    return log_total_C - picked_C, vocabulary.z_loss * log_total_C.square()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: _Vocabulary) -> tuple[Tensor, Tensor]:
        logits_MV = logits.reshape(-1, logits.shape[-1])
        local = _Labels.within(labels.reshape(-1), vocabulary)
        log_total_M, picked_M = _log_totals(logits_MV, local, vocabulary)
        ctx.save_for_backward(logits, log_total_M, local.columns, local.is_elsewhere)
        ctx.vocabulary = vocabulary
        ctx.set_materialize_grads(False)
        return (log_total_M - picked_M).view(labels.shape), log_total_M.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_totals: Tensor | None) -> tuple[Tensor, None, None]:
        logits, log_total_M, *labels = ctx.saved_tensors
        logits_MV = logits.reshape(-1, logits.shape[-1])
        result_MV = torch.empty_like(logits_MV)
        of_totals_M = None if of_totals is None else of_totals.reshape(-1)
        _gradient_of_logits(
            *(result_MV, logits_MV, log_total_M, _Labels(*labels), gradient.reshape(-1)),
            ctx.vocabulary,
            of_totals_M,
        )
        return result_MV.view(logits.shape), None, None


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        labels_M: Tensor,
        weights_M: Tensor,
        vocabulary: _Vocabulary,
        chunk_rows: int,
        needs_gradients: bool,
        keeps_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=hidden_MD.device, dtype=vocabulary.dtype)
        of_z = torch.zeros_like(total)
        hidden_gradient_MD = torch.empty_like(hidden_MD) if needs_gradients else None
        # Summed over chunks, so in float32 for any dtype of the weight.
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=vocabulary.dtype) if needs_gradients else None
        for first in range(0, len(hidden_MD), chunk_rows):
            part = slice(first, first + chunk_rows)
            logits_CV = hidden_MD[part] @ weight_VD.t()
            local = _Labels.within(labels_M[part], vocabulary)
            tanh_CV: Tensor | None = None
            if vocabulary.softcap is not None:
                tanh_CV = (logits_CV.to(vocabulary.dtype) / vocabulary.softcap).tanh_()
                logits_CV = tanh_CV * vocabulary.softcap
            if needs_gradients and vocabulary.z_loss:
                loss_C, z_C = _loss_and_gradient_with_z(logits_CV, local, weights_M[part], vocabulary)
                of_z += (z_C * weights_M[part]).sum()
            elif needs_gradients:
                loss_C = _loss_and_gradient(logits_CV, local, weights_M[part], vocabulary)
            else:
                log_total_C, picked_C = _log_totals(logits_CV, local, vocabulary)
                loss_C = log_total_C - picked_C
            total += (loss_C * weights_M[part]).sum()
            if hidden_gradient_MD is None or weight_gradient_VD is None:
                continue
            if tanh_CV is not None:
                logits_CV = logits_CV.mul_(tanh_CV.square_().neg_().add_(1)).to(hidden_MD.dtype)
            torch.mm(logits_CV, weight_VD, out=hidden_gradient_MD[part])
            _add_product(weight_gradient_VD, logits_CV.t(), hidden_MD[part])
        ctx.gradients = (hidden_gradient_MD, weight_gradient_VD)
        ctx.dtype = weight_VD.dtype
        ctx.keeps_gradients = keeps_gradients
        ctx.kept = None
        ctx.mark_non_differentiable(of_z)
        return total, of_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _of_z: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is not None:
            return None, ctx.kept, *_NO_GRADIENTS
        (hidden_gradient_MD, weight_gradient_VD), ctx.gradients = ctx.gradients, None
        hidden_gradient_MD.mul_(gradient)
        weight_gradient_VD = weight_gradient_VD.mul_(gradient).to(ctx.dtype)
        if ctx.keeps_gradients:
            ctx.kept = weight_gradient_VD
        return hidden_gradient_MD, weight_gradient_VD, *_NO_GRADIENTS


# Of the arguments that are not differentiated.
_NO_GRADIENTS = (None,) * 6


def _add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    if left_VC.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_VC, right_CD)
    elif sum_VD.is_cuda:
        # The product is added before it is rounded, in one kernel; PyTorch has this for GPUs only.
        torch.addmm(sum_VD, left_VC, right_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += left_VC @ right_CD
