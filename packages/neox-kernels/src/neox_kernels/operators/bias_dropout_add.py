"""Fused bias, dropout and residual addition: `residual + dropout(x + bias)`.

    y = residual + keep (x + bias) / (1 - p),      keep = 1 with probability 1 - p, else 0
    dx = keep dy / (1 - p),   d bias = sum of dx over rows,   d residual = dy

The fused implementation stores only the seed, and recomputes the mask for backward (philox.py), with p
rounded to a multiple of 2^-16. The reference uses PyTorch's dropout: the same distribution and generator, but
a different mask.

Source: arXiv:1207.0580 (dropout), arXiv:1909.08053 (the fused operator).
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from neox_kernels import native, shapes
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.philox import KEEP_ALL, draw_seed, keep_below, kept
from neox_kernels.precision import widen

__all__ = ["bias_dropout_add"]


def _bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool = True
) -> Tensor:
    """Compute `residual + dropout(x + bias)`.

    Args:
        x: any shape `[..., D]`.
        bias: `[D]`, or None.
        residual: same shape as `x`.
        p: probability of dropping an element, in [0, 1].
        training: if False, no dropout is applied.

    Returns:
        Tensor with the shape of `x` and the residual's dtype.
    """
    biased = widen(x) if bias is None else widen(x) + widen(bias)
    return (widen(residual) + F.dropout(biased, p, training)).to(residual.dtype)


def _scale(p: float) -> float:
    """Return the factor of kept elements that leaves the expected value unchanged."""
    bound = keep_below(p)
    return KEEP_ALL / bound if bound else 0.0


def _apply_mask(wide: Tensor, seed: Tensor | None, p: float) -> Tensor:
    if seed is None:
        return wide
    return torch.where(kept(seed, wide.shape, keep_below(p)), wide * _scale(p), 0.0)


@custom_operator("bias_dropout_add_forward", like=("residual",))
def _forward(x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor | None, p: float) -> Tensor:
    compiled = native.compiled_for(x, bias, residual, seed)
    if compiled is None:
        biased = widen(x) if bias is None else widen(x) + widen(bias)
        return (widen(residual) + _apply_mask(biased, seed, p)).to(residual.dtype).contiguous()
    x, residual = x.contiguous(), residual.contiguous()
    bias = None if bias is None else bias.contiguous()
    result = torch.empty_like(residual)
    compiled.bias_dropout_add_forward(
        *native.site(x), x.data_ptr(), native.parameter(bias), residual.data_ptr(),
        0 if seed is None else seed.data_ptr(), result.data_ptr(), shapes.rows(x), shapes.columns(x),
        KEEP_ALL if seed is None else keep_below(p), _scale(p),
    )  # fmt: skip
    return result


@custom_operator("bias_dropout_add_backward", like=("gradient", "bias"))
def _backward(gradient: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the bias; empty for a bias that is None."""
    compiled = native.compiled_for(gradient, bias, seed)
    if compiled is None:
        wide = _apply_mask(widen(gradient), seed, p)
        of_bias = wide.new_empty(0) if bias is None else shapes.sum_rows(wide).to(bias.dtype)
        return wide.to(gradient.dtype, copy=True).contiguous(), of_bias
    gradient = gradient.contiguous()
    x_gradient = torch.empty_like(gradient)
    bias_gradient = gradient.new_empty(0) if bias is None else torch.empty_like(bias)
    place, rows, columns = native.site(gradient), shapes.rows(gradient), shapes.columns(gradient)
    count, partials = 0, None
    if bias is not None:
        count = compiled.bias_dropout_add_partial_rows(place[0], place[2], rows, columns)
        partials = native.partials(gradient, count, columns)
    compiled.bias_dropout_add_backward(
        *place, gradient.data_ptr(), 0 if seed is None else seed.data_ptr(), x_gradient.data_ptr(),
        native.parameter(None if bias is None else bias_gradient),
        0 if partials is None else partials.data_ptr(), count, rows, columns,
        KEEP_ALL if seed is None else keep_below(p), _scale(p),
    )  # fmt: skip
    return x_gradient, bias_gradient


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, seed, ctx.p = inputs
    ctx.save_for_backward(bias, seed)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
    bias, seed = ctx.saved_tensors
    x_gradient, bias_gradient = _backward(gradient, bias, seed, ctx.p)
    return x_gradient, None if bias is None else bias_gradient, gradient, None, None


_backward.refuse_gradient()
_forward.register_autograd(_differentiate, setup_context=_keep)


def _fused_bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool = True
) -> Tensor:
    shapes.check_equal("x", x, "the residual", residual)
    if bias is not None:
        shapes.check_width("bias", bias, x)
    seed = draw_seed(x.device) if training and p > 0 else None
    result: Tensor = _forward(x.to(residual.dtype), bias, residual, seed, p if seed is not None else 0.0)
    return result


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    bias = torch.randn(shape[-1:], dtype=dtype, device=device, requires_grad=True)
    return x, bias, torch.randn(shape, dtype=dtype, device=device, requires_grad=True), 0.1


def _example_without_dropout(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    return *_example(shape, dtype, device)[:3], 0.0


bias_dropout_add = Operator(
    name="bias_dropout_add",
    reference=_bias_dropout_add,
    fused=_fused_bias_dropout_add,
    example=_example,
    comparable_example=_example_without_dropout,
)
