"""Softmax of scaled attention scores: causal, masked, or unmasked.

    p = softmax(scale * scores)  over the last dimension, visible keys only
    d scores = scale * p * (dp - sum(dp * p))

Computed in float32 (float64 for float64) and returned in the input's dtype. Hidden entries are exactly 0. A
row without visible keys, or whose visible scores are all -inf, is all zeros and passes no gradient;
PyTorch's softmax returns NaN there.

Source: arXiv:1909.08053 (the operators), arXiv:1706.03762 section 3.2.1 (the formula).
"""

import math
from typing import Any

import torch
from torch import Tensor

from neox_kernels import native
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.precision import widen

__all__ = ["scaled_causal_softmax", "scaled_masked_softmax", "scaled_softmax"]


def _softmax_or_zeros(scores: Tensor) -> Tensor:
    peak = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - peak.masked_fill(peak == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0.0, 1.0)


def _scaled_softmax(scores_BNST: Tensor, scale: float = 1.0) -> Tensor:
    """Compute the softmax over keys of `scale * scores`.

    Args:
        scores_BNST: unscaled attention scores (any number of leading dimensions).
        scale: multiplier before the softmax, usually 1 / sqrt(head_width).

    Returns:
        Probabilities, same shape and dtype.
    """
    return _softmax_or_zeros(widen(scores_BNST) * scale).to(scores_BNST.dtype)


def _scaled_causal_softmax(scores_BNST: Tensor, scale: float = 1.0) -> Tensor:
    """Compute the softmax over keys of `scale * scores`, hiding keys after the query.

    The last query sees all keys: query s sees keys up to s + (T - S), as with cached keys.

    Args:
        scores_BNST: unscaled attention scores (any number of leading dimensions).
        scale: multiplier before the softmax, usually 1 / sqrt(head_width).

    Returns:
        Probabilities, same shape and dtype; hidden entries are exactly 0.
    """
    num_queries, num_keys = scores_BNST.shape[-2:]
    hidden_ST = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores_BNST.device)
    hidden_ST = hidden_ST.triu(1 + num_keys - num_queries)
    scores = (widen(scores_BNST) * scale).masked_fill(hidden_ST, -math.inf)
    return _softmax_or_zeros(scores).to(scores_BNST.dtype)


def _scaled_masked_softmax(scores_BNST: Tensor, masked_out: Tensor, scale: float = 1.0) -> Tensor:
    """Compute the softmax over keys of `scale * scores`, hiding keys where `masked_out` is True.

    Args:
        scores_BNST: unscaled attention scores (any number of leading dimensions).
        masked_out: boolean, broadcastable to the scores; True hides a key.
        scale: multiplier before the softmax, usually 1 / sqrt(head_width).

    Returns:
        Probabilities, same shape and dtype; hidden entries, and rows without visible keys, are exactly 0.
    """
    scores = (widen(scores_BNST) * scale).masked_fill(masked_out, -math.inf)
    return _softmax_or_zeros(scores).to(scores_BNST.dtype)


def _mask_layout(masked_out: Tensor | None, scores: Tensor) -> tuple[Tensor | None, int, tuple[int, ...]]:
    """Return the mask for the kernel: the tensor (kept alive by the caller), inner leading size, strides."""
    if masked_out is None:
        return None, 1, (0, 0, 0, 0)
    shape = (1,) * (4 - scores.ndim) + tuple(scores.shape[-3:])
    wide = masked_out.expand(scores.shape).reshape(-1, *shape[-3:])
    return wide, shape[-3], wide.stride()


def _lead_and_queries(scores: Tensor, by_query: bool) -> tuple[int, int]:
    rows = math.prod(scores.shape[:-1])
    if not by_query or scores.ndim < 2:
        return 1, rows
    return math.prod(scores.shape[:-2]), scores.shape[-2]


@custom_operator("softmax_forward", like=("scores",))
def _forward(scores: Tensor, masked_out: Tensor | None, scale: float, causal: bool) -> Tensor:
    compiled = native.compiled_for(scores, masked_out)
    if compiled is None:
        if masked_out is not None:
            return _scaled_masked_softmax(scores, masked_out, scale).contiguous()
        plain = _scaled_causal_softmax if causal else _scaled_softmax
        return plain(scores, scale).contiguous()
    scores = scores.contiguous()
    probabilities = torch.empty_like(scores)
    if scores.numel() == 0:
        return probabilities
    mask, inner, strides = _mask_layout(masked_out, scores)
    compiled.softmax_forward(
        *native.site(scores), scores.data_ptr(), 0 if mask is None else mask.data_ptr(), inner, strides,
        probabilities.data_ptr(), *_lead_and_queries(scores, causal or mask is not None), scores.shape[-1],
        scale, causal,
    )  # fmt: skip
    return probabilities


@custom_operator("softmax_backward", like=("probabilities",))
def _backward(gradient: Tensor, probabilities: Tensor, scale: float, causal: bool) -> Tensor:
    compiled = native.compiled_for(gradient, probabilities)
    if compiled is None:
        above, p = widen(gradient), widen(probabilities)
        return (scale * p * (above - (above * p).sum(-1, keepdim=True))).to(gradient.dtype).contiguous()
    gradient, probabilities = gradient.contiguous(), probabilities.contiguous()
    result = torch.empty_like(probabilities)
    compiled.softmax_backward(
        *native.site(gradient), gradient.data_ptr(), probabilities.data_ptr(), result.data_ptr(),
        *_lead_and_queries(gradient, causal), gradient.shape[-1], scale, causal,
    )  # fmt: skip
    return result


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (probabilities,) = ctx.saved_tensors
    return _backward(gradient, probabilities, ctx.scale, ctx.causal), None, None, None


_backward.refuse_gradient()
_forward.register_autograd(_differentiate, setup_context=_keep)


def _softmax(scores: Tensor, masked_out: Tensor | None, scale: float, causal: bool) -> Tensor:
    result: Tensor = _forward(scores, masked_out, scale, causal)
    return result


def _fused_softmax(scores_BNST: Tensor, scale: float = 1.0) -> Tensor:
    return _softmax(scores_BNST, None, scale, False)


def _fused_causal_softmax(scores_BNST: Tensor, scale: float = 1.0) -> Tensor:
    return _softmax(scores_BNST, None, scale, True)


def _fused_masked_softmax(scores_BNST: Tensor, masked_out: Tensor, scale: float = 1.0) -> Tensor:
    if masked_out.dtype != torch.bool:
        raise TypeError(f"masked_out is {masked_out.dtype}; it must be boolean (True hides a key)")
    return _softmax(scores_BNST, masked_out, scale, False)


def _scores(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=True), 0.125


def _masked_scores(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    scores, scale = _scores(shape, dtype, device)
    return scores, torch.rand(shape[-2:], device=device) < 0.3, scale


scaled_softmax = Operator(
    name="scaled_softmax", reference=_scaled_softmax, fused=_fused_softmax, example=_scores
)
scaled_causal_softmax = Operator(
    name="scaled_causal_softmax",
    reference=_scaled_causal_softmax,
    fused=_fused_causal_softmax,
    example=_scores,
)
scaled_masked_softmax = Operator(
    name="scaled_masked_softmax",
    reference=_scaled_masked_softmax,
    fused=_fused_masked_softmax,
    example=_masked_scores,
)
