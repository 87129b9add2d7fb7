"""Layer normalization, fused here or by NVIDIA apex's kernel.

    n = (x - mean(x)) / sqrt(var(x) + epsilon),   y = n weight + bias                  over the last dimension
    dx = (w - mean(w) - n mean(w n)) / sqrt(var(x) + epsilon),   w = weight dy
    d weight = sum of n dy over rows,   d bias = sum of dy over rows

`add_layer_norm` normalizes the sum of x and a residual, and returns both; its backward pass adds the gradient
that arrives at the sum to dx. `layer_norm.with_input` returns x too, and adds its gradient to dx.

Source: arXiv:1607.06450.
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from neox_kernels import native, shapes
from neox_kernels.availability import Availability
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.operators.norm_gradients import register_gradients
from neox_kernels.precision import widen

__all__ = ["add_layer_norm", "apex_layer_norm", "layer_norm"]

_APEX_MODULE = "apex.normalization.fused_layer_norm"


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Apply layer normalization over the last dimension.

    Args:
        x: any shape `[..., D]`.
        weight: `[D]`; its dtype may differ from the input's.
        bias: `[D]`, with the weight's dtype.
        epsilon: added to the variance.

    Returns:
        Tensor with the shape and dtype of `x`.
    """
    wide = widen(x)
    return F.layer_norm(wide, x.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), epsilon).to(x.dtype)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add x to a residual, and apply layer normalization to the sum.

    Args:
        x: any shape `[..., D]`.
        residual: same shape.
        weight: `[D]`; its dtype may differ from the residual's.
        bias: `[D]`, with the weight's dtype.
        epsilon: added to the variance.

    Returns:
        The sum and the normalized sum, with the shape and dtype of `residual`.
    """
    total = residual + x.to(residual.dtype)
    return total, _layer_norm(total, weight, bias, epsilon)


@custom_operator("layer_norm_forward", returned=1)
def _forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the result, and the means of the rows, followed by their inverse standard deviations."""
    compiled = native.compiled_for(x, weight, bias)
    if compiled is None:
        return _plain_results(x, weight, bias, epsilon)
    x, rows = x.contiguous(), shapes.rows(x)
    result, statistics = torch.empty_like(x), _empty_statistics(x, rows)
    compiled.layer_norm_forward(
        *native.site(x), x.data_ptr(), 0, native.parameter(weight), native.parameter(bias), 0,
        result.data_ptr(), *_addresses(statistics, rows), rows, shapes.columns(x), epsilon,
    )  # fmt: skip
    return result, statistics


@custom_operator("add_layer_norm_forward", returned=2)
def _forward_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum, the result, and the means of the rows, followed by their inverse deviations."""
    compiled = native.compiled_for(x, residual, weight, bias)
    if compiled is None:
        total = (residual + x).contiguous()
        return total, *_plain_results(total, weight, bias, epsilon)
    x, residual, rows = x.contiguous(), residual.contiguous(), shapes.rows(x)
    total, result, statistics = torch.empty_like(x), torch.empty_like(x), _empty_statistics(x, rows)
    compiled.layer_norm_forward(
        *native.site(x), x.data_ptr(), residual.data_ptr(), native.parameter(weight), native.parameter(bias),
        total.data_ptr(), result.data_ptr(), *_addresses(statistics, rows), rows, shapes.columns(x), epsilon,
    )  # fmt: skip
    return total, result, statistics


def _plain_results(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(widen(x), dim=-1, correction=0)
    result = _layer_norm(x, weight, bias, epsilon).contiguous()
    return result, torch.cat((mean.flatten(), torch.rsqrt(variance + epsilon).flatten()))


def _empty_statistics(x: Tensor, rows: int) -> Tensor:
    """Allocate means and inverse standard deviations in one tensor, because each allocation takes time."""
    return x.new_empty(2 * rows, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _addresses(statistics: Tensor, rows: int) -> tuple[int, int]:
    """Return the addresses of the means and of the inverse standard deviations, both of float32."""
    return statistics.data_ptr(), statistics.data_ptr() + 4 * rows


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), _empty_statistics(x, shapes.rows(x))


@_forward_of_sum.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    total, result = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return total, result, _empty_statistics(x, shapes.rows(x))


@custom_operator("layer_norm_backward", like=("x", "weight", "weight"))
def _backward(
    gradient: Tensor, of_sum: Tensor | None, x: Tensor, weight: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; `of_sum`, if there is one, is added to that of x."""
    compiled = native.compiled_for(x, gradient, of_sum, weight, statistics)
    if compiled is None:
        mean, inverse = statistics.view(2, *x.shape[:-1], 1)
        above, normal = widen(gradient), (widen(x) - mean) * inverse
        weighted = above * weight.to(above.dtype)
        along, across = (weighted * normal).mean(-1, keepdim=True), weighted.mean(-1, keepdim=True)
        of_x = (weighted - normal * along - across) * inverse
        of_x = of_x if of_sum is None else of_x + widen(of_sum)
        of_weight, of_bias = shapes.sum_rows(above * normal), shapes.sum_rows(above)
        return of_x.to(x.dtype).contiguous(), of_weight.to(weight.dtype), of_bias.to(weight.dtype)
    gradient, x = gradient.contiguous(), x.contiguous()
    of_sum = None if of_sum is None else of_sum.contiguous()
    of_x, of_weight, of_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    place, rows, columns = native.site(x), shapes.rows(x), shapes.columns(x)
    parameter = native.parameter(weight)
    partial_rows = compiled.layer_norm_partial_rows(place[0], place[2], parameter[1], rows, columns)
    partials = native.partials(x, 2 * partial_rows, columns)
    compiled.layer_norm_backward(
        *place, gradient.data_ptr(), 0 if of_sum is None else of_sum.data_ptr(), x.data_ptr(), parameter,
        *_addresses(statistics, rows), of_x.data_ptr(), native.parameter(of_weight),
        native.parameter(of_bias), partials.data_ptr(), partial_rows, rows, columns,
    )  # fmt: skip
    return of_x, of_weight, of_bias


_forward_with_input = register_gradients(_forward, _forward_of_sum, _backward)


def _fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    result: Tensor = _forward(x, *native.norm_parameters(x, weight, bias), epsilon)
    return result


def _fused_with_input(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    x, result = _forward_with_input(x, *native.norm_parameters(x, weight, bias), epsilon)
    return x, result


def _fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    shapes.check_equal("x", x, "the residual", residual)
    parameters = native.norm_parameters(residual, weight, bias)
    total, result = _forward_of_sum(x.to(residual.dtype), residual, *parameters, epsilon)
    return total, result


def _apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    apex = importlib.import_module(_APEX_MODULE)
    result: Tensor = apex.fused_layer_norm_affine(x, weight, bias, tuple(x.shape[-1:]), epsilon)
    return result.to(x.dtype)


def _apex_availability(device: torch.device, dtype: torch.dtype, *, may_build: bool) -> Availability:
    if device.type != "cuda":
        return Availability(
            False, f"apex's layer norm requires an NVIDIA GPU, and the tensors are on {device.type!r}"
        )
    try:
        importlib.import_module("fused_layer_norm_cuda")
        importlib.import_module(_APEX_MODULE)
    except ImportError as error:
        return Availability(
            False,
            f"NVIDIA apex with its layer norm extension cannot be imported ({error}; apex on PyPI is a "
            "different package); clone github.com/NVIDIA/apex and run in it: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "
            "pip install -v --no-build-isolation .",
        )
    return Availability(True, "NVIDIA apex")


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return tuple(
        torch.randn(size, dtype=dtype, device=device, requires_grad=True)
        for size in (shape, shape[-1:], shape[-1:])
    )


def _example_with_residual(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    x, *parameters = _example(shape, dtype, device)
    return x, torch.randn(shape, dtype=dtype, device=device, requires_grad=True), *parameters


layer_norm = Operator(
    name="layer_norm",
    reference=_layer_norm,
    fused=_fused_layer_norm,
    example=_example,
    with_input=_fused_with_input,
)
add_layer_norm = Operator(
    name="add_layer_norm",
    reference=_add_layer_norm,
    fused=_fused_add_layer_norm,
    example=_example_with_residual,
)
apex_layer_norm = Operator(
    name="apex_layer_norm",
    reference=_layer_norm,
    fused=_apex_layer_norm,
    example=_example,
    availability=_apex_availability,
)
