"""Cross entropy of rows of logits, with its gradient in place of the logits.

    log_total = log(sum_v exp(logit_v))        picked = logit_label
    loss      = log_total - picked
    d logit_v = weight * (exp(logit_v - log_total) - [v is the label])

over the first `width` columns; the others count as minus infinity. Computed in float32 (float64 for float64).
A vocabulary can be split by columns over ranks: the first call computes log_total and picked of each part,
and the second takes the log_total of the whole rows and computes the gradient.

Source: arXiv:1909.08053, section 3 (fusing the output with the loss).
"""

import math
from typing import Any

import torch
from torch import Tensor

from neox_kernels import native
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.precision import widen

__all__ = ["cross_entropy"]

_Results = tuple[Tensor, Tensor, Tensor]


def _cross_entropy(
    logits_RV: Tensor,
    labels_R: Tensor,
    weights_R: Tensor | None,
    log_total_R: Tensor | None,
    width: int,
) -> _Results:
    """Compute the two parts of each row's loss; with weights, replace the logits by their gradient.

    Args:
        logits_RV: logits, contiguous; overwritten if weights are given.
        labels_R: column of each row's label, int64; outside [0, width) if another rank has it.
        weights_R: weight of each row's loss, float32; None: compute no gradient.
        log_total_R: logarithm of the softmax's denominator of the whole rows; None: compute it from these
            columns.
        width: number of columns in the vocabulary.

    Returns:
        log_total_R and picked_R, float32 (picked is 0 where the label is elsewhere), and the logits' memory.
    """
    values = widen(logits_RV[:, :width])
    is_here = (labels_R >= 0) & (labels_R < width)
    columns = labels_R.masked_fill(~is_here, 0).unsqueeze(1)
    picked_R = values.gather(1, columns).squeeze(1).masked_fill(~is_here, 0.0)
    if log_total_R is None:
        log_total_R = values.logsumexp(dim=-1)
    if weights_R is not None:
        weights = weights_R.to(values.dtype)
        gradient = torch.exp(values - log_total_R.unsqueeze(1)) * weights.unsqueeze(1)
        gradient.scatter_add_(1, columns, torch.where(is_here, -weights, 0.0).unsqueeze(1))
        logits_RV[:, :width] = gradient.to(logits_RV.dtype)
        logits_RV[:, width:] = 0.0
    return log_total_R, picked_R, logits_RV


@custom_operator("cross_entropy_", mutates_args=("logits",))
def _in_place(
    logits: Tensor, labels: Tensor, weights: Tensor | None, log_totals: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    compiled = native.compiled_for(logits, labels, weights, log_totals)
    if compiled is None:
        found, picked, _ = _cross_entropy(logits, labels, weights, log_totals, width)
        # An operator must not return its arguments.
        return found.clone() if found is log_totals else found, picked
    rows, columns = logits.shape
    found = torch.empty(rows, dtype=torch.float32, device=logits.device)
    picked = torch.empty_like(found)
    labels = labels.contiguous()
    weights = None if weights is None else weights.contiguous()
    log_totals = None if log_totals is None else log_totals.contiguous()
    compiled.cross_entropy(
        *native.site(logits), logits.data_ptr(), labels.data_ptr(),
        0 if weights is None else weights.data_ptr(), 0 if log_totals is None else log_totals.data_ptr(),
        found.data_ptr(), picked.data_ptr(), rows, columns, width,
    )  # fmt: skip
    return found, picked


@_in_place.register_fake
def _(
    logits: Tensor, labels: Tensor, weights: Tensor | None, log_totals: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(len(logits), dtype=dtype), logits.new_empty(len(logits), dtype=dtype)


def _check(
    logits: Tensor, labels: Tensor, weights: Tensor | None, log_totals: Tensor | None, width: int
) -> None:
    if logits.ndim != 2 or not logits.is_contiguous():
        raise ValueError(f"logits must be a contiguous matrix, not {tuple(logits.shape)}, {logits.stride()}")
    rows, columns = logits.shape
    if labels.ndim != 1 or labels.numel() != rows or labels.dtype != torch.int64:
        raise ValueError(f"labels must be {rows} int64 values, not {tuple(labels.shape)}, {labels.dtype}")
    if not 0 <= width <= columns:
        raise ValueError(f"width is {width}; it must be between 0 and the {columns} columns")
    _check_rows("weights", weights, rows, logits)
    _check_rows("log totals", log_totals, rows, logits)


def _check_rows(name: str, given: Tensor | None, rows: int, logits: Tensor) -> None:
    if given is None:
        return
    expected = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if given.ndim != 1 or given.numel() != rows or given.dtype != expected:
        raise ValueError(f"{name} must be {rows} {expected} values, not {tuple(given.shape)}, {given.dtype}")


def _fused_cross_entropy(
    logits_RV: Tensor,
    labels_R: Tensor,
    weights_R: Tensor | None,
    log_total_R: Tensor | None,
    width: int,
) -> _Results:
    _check(logits_RV, labels_R, weights_R, log_total_R, width)
    log_total_R, picked_R = _in_place(logits_RV, labels_R, weights_R, log_total_R, width)
    return log_total_R, picked_R, logits_RV


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    logits = torch.randn(rows, columns, dtype=dtype, device=device)
    labels = torch.randint(0, columns, (rows,), device=device)
    weights = torch.rand(
        rows, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    return logits, labels, weights, None, columns


cross_entropy = Operator(
    name="cross_entropy", reference=_cross_entropy, fused=_fused_cross_entropy, example=_example
)
