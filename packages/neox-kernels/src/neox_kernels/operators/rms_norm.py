"""Root mean square (RMS) normalization.

    n = x / sqrt(mean(x^2) + epsilon),   y = n weight                                  over the last dimension
    dx = (w - n mean(w n)) / sqrt(mean(x^2) + epsilon),   w = weight dy,   d weight = sum of n dy over rows

`add_rms_norm` normalizes the sum of x and a residual, and returns both; its backward pass adds the gradient
that arrives at the sum to dx. `rms_norm.with_input` returns x too, and adds its gradient to dx.

Source: arXiv:1910.07467.
"""

from typing import Any

import torch
from torch import Tensor

from neox_kernels import native, shapes
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.operators.norm_gradients import register_gradients
from neox_kernels.precision import widen

__all__ = ["add_rms_norm", "rms_norm"]


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Apply root mean square normalization over the last dimension.

    Args:
        x: any shape `[..., D]`.
        weight: `[D]`; its dtype may differ from the input's.
        epsilon: added to the mean square.

    Returns:
        Tensor with the shape and dtype of `x`.
    """
    wide = widen(x)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (normal * weight.to(wide.dtype)).to(x.dtype)


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """Add x to a residual, and apply root mean square normalization to the sum.

    Args:
        x: any shape `[..., D]`.
        residual: same shape.
        weight: `[D]`; its dtype may differ from the residual's.
        epsilon: added to the mean square.

    Returns:
        The sum and the normalized sum, with the shape and dtype of `residual`.
    """
    total = residual + x.to(residual.dtype)
    return total, _rms_norm(total, weight, epsilon)


@custom_operator("rms_norm_forward", returned=1)
def _forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the result and the inverse root mean square of each row."""
    compiled = native.compiled_for(x, weight)
    if compiled is None:
        return _plain_results(x, weight, epsilon)
    x = x.contiguous()
    result, inverse = torch.empty_like(x), _empty_inverse(x)
    compiled.rms_norm_forward(
        *native.site(x), x.data_ptr(), 0, native.parameter(weight), 0, result.data_ptr(), inverse.data_ptr(),
        shapes.rows(x), shapes.columns(x), epsilon,
    )  # fmt: skip
    return result, inverse


@custom_operator("add_rms_norm_forward", returned=2)
def _forward_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum, the result and the inverse root mean square of each row."""
    compiled = native.compiled_for(x, residual, weight)
    if compiled is None:
        total = (residual + x).contiguous()
        return total, *_plain_results(total, weight, epsilon)
    x, residual = x.contiguous(), residual.contiguous()
    total, result, inverse = torch.empty_like(x), torch.empty_like(x), _empty_inverse(x)
    compiled.rms_norm_forward(
        *native.site(x), x.data_ptr(), residual.data_ptr(), native.parameter(weight), total.data_ptr(),
        result.data_ptr(), inverse.data_ptr(), shapes.rows(x), shapes.columns(x), epsilon,
    )  # fmt: skip
    return total, result, inverse


def _plain_results(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    inverse = torch.rsqrt(widen(x).square().mean(-1) + epsilon).flatten()
    return _rms_norm(x, weight, epsilon).contiguous(), inverse


def _empty_inverse(x: Tensor) -> Tensor:
    return x.new_empty(shapes.rows(x), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


@_forward.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), _empty_inverse(x)


@_forward_of_sum.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    total, result = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return total, result, _empty_inverse(x)


@custom_operator("rms_norm_backward", like=("x", "weight"))
def _backward(
    gradient: Tensor, of_sum: Tensor | None, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and the weight; `of_sum`, if there is one, is added to that of x."""
    compiled = native.compiled_for(x, gradient, of_sum, weight, inverse)
    if compiled is None:
        by_row = inverse.view(*x.shape[:-1], 1)
        above, normal = widen(gradient), widen(x) * by_row
        weighted = above * weight.to(above.dtype)
        of_x = (weighted - normal * (weighted * normal).mean(-1, keepdim=True)) * by_row
        of_x = of_x if of_sum is None else of_x + widen(of_sum)
        return of_x.to(x.dtype).contiguous(), shapes.sum_rows(above * normal).to(weight.dtype)
    gradient, x = gradient.contiguous(), x.contiguous()
    of_sum = None if of_sum is None else of_sum.contiguous()
    of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
    place, rows, columns = native.site(x), shapes.rows(x), shapes.columns(x)
    parameter = native.parameter(weight)
    partial_rows = compiled.rms_norm_partial_rows(place[0], place[2], parameter[1], rows, columns)
    partials = native.partials(x, partial_rows, columns)
    compiled.rms_norm_backward(
        *place, gradient.data_ptr(), 0 if of_sum is None else of_sum.data_ptr(), x.data_ptr(), parameter,
        inverse.data_ptr(), of_x.data_ptr(), native.parameter(of_weight), partials.data_ptr(), partial_rows,
        rows, columns,
    )  # fmt: skip
    return of_x, of_weight


_forward_with_input = register_gradients(_forward, _forward_of_sum, _backward)


def _fused_rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-8) -> Tensor:
    result: Tensor = _forward(x, *native.norm_parameters(x, weight), epsilon)
    return result


def _fused_with_input(x: Tensor, weight: Tensor, epsilon: float = 1e-8) -> tuple[Tensor, Tensor]:
    x, result = _forward_with_input(x, *native.norm_parameters(x, weight), epsilon)
    return x, result


def _fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-8
) -> tuple[Tensor, Tensor]:
    shapes.check_equal("x", x, "the residual", residual)
    total, result = _forward_of_sum(
        x.to(residual.dtype), residual, *native.norm_parameters(residual, weight), epsilon
    )
    return total, result


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    return x, torch.randn(shape[-1:], dtype=dtype, device=device, requires_grad=True)


def _example_with_residual(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    x, weight = _example(shape, dtype, device)
    return x, torch.randn(shape, dtype=dtype, device=device, requires_grad=True), weight


rms_norm = Operator(
    name="rms_norm",
    reference=_rms_norm,
    fused=_fused_rms_norm,
    example=_example,
    with_input=_fused_with_input,
)
add_rms_norm = Operator(
    name="add_rms_norm",
    reference=_add_rms_norm,
    fused=_fused_add_rms_norm,
    example=_example_with_residual,
)
