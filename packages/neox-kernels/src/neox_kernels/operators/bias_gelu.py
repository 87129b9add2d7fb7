"""Fused bias and GELU: `gelu(x + bias)`, with the tanh approximation or the error function.

    erf:   y = z Phi(z),              y' = Phi(z) + z phi(z),                                z = x + bias
    tanh:  y = z s,                   y' = s + z s (1 - s) u',      s = sigmoid(u) = (1 + tanh(u / 2)) / 2,
           u = 2 sqrt(2 / pi) (z + 0.044715 z^3)

Phi and phi are the normal distribution and its density; u is twice the usual argument of the tanh. The
gradient of the bias is the sum of the gradient of x over rows.

Source: arXiv:1606.08415, section 2.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from neox_kernels import native, shapes
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.precision import widen

__all__ = ["GeluForm", "bias_gelu", "gelu", "gelu_slope"]

GeluForm = Literal["tanh", "erf"]

TWO_ROOT_TWO_BY_PI = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu(z: Tensor, form: str) -> Tensor:
    """Apply the Gaussian error linear unit in the given form."""
    return F.gelu(z, approximate="none" if form == "erf" else "tanh")


def gelu_slope(z: Tensor, form: str) -> Tensor:
    """Return the derivative of `gelu`."""
    if form == "erf":
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density
    s = torch.sigmoid(TWO_ROOT_TWO_BY_PI * z * (1 + CUBIC * z * z))
    bend = s * (1 - s)
    return s + torch.where(bend == 0, 0.0, z * bend * TWO_ROOT_TWO_BY_PI * (1 + 3 * CUBIC * z * z))


def _bias_gelu(x: Tensor, bias: Tensor, form: GeluForm = "tanh") -> Tensor:
    """Apply GELU to `x + bias`.

    Args:
        x: any shape `[..., F]`.
        bias: `[F]`.
        form: "tanh" (approximation) or "erf" (exact).

    Returns:
        Tensor with the shape and dtype of `x`.
    """
    return gelu(widen(x) + widen(bias), form).to(x.dtype)


@custom_operator("bias_gelu_forward", like=("x",))
def _forward(x: Tensor, bias: Tensor, form: str) -> Tensor:
    compiled = native.compiled_for(x, bias)
    if compiled is None:
        return gelu(widen(x) + widen(bias), form).to(x.dtype).contiguous()
    x, bias = x.contiguous(), bias.contiguous()
    result = torch.empty_like(x)
    columns = bias.numel()
    compiled.bias_gelu_forward(
        *native.site(x), x.data_ptr(), native.parameter(bias), result.data_ptr(), shapes.rows(x), columns,
        form == "tanh",
    )  # fmt: skip
    return result


@custom_operator("bias_gelu_backward", like=("x", "bias"))
def _backward(gradient: Tensor, x: Tensor, bias: Tensor, form: str) -> tuple[Tensor, Tensor]:
    compiled = native.compiled_for(x, gradient, bias)
    if compiled is None:
        wide = widen(gradient) * gelu_slope(widen(x) + widen(bias), form)
        return wide.to(x.dtype).contiguous(), shapes.sum_rows(wide).to(bias.dtype)
    gradient, x, bias = gradient.contiguous(), x.contiguous(), bias.contiguous()
    x_gradient, bias_gradient = torch.empty_like(x), torch.empty_like(bias)
    place, rows, columns = native.site(x), shapes.rows(x), bias.numel()
    count = compiled.bias_gelu_partial_rows(place[0], place[2], rows, columns, form == "tanh")
    partials = native.partials(x, count, columns)
    compiled.bias_gelu_backward(
        *place, gradient.data_ptr(), x.data_ptr(), native.parameter(bias), x_gradient.data_ptr(),
        native.parameter(bias_gradient), partials.data_ptr(), count, rows, columns, form == "tanh",
    )  # fmt: skip
    return x_gradient, bias_gradient


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.form = inputs
    ctx.save_for_backward(x, bias)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_backward(gradient, *ctx.saved_tensors, ctx.form), None


_backward.refuse_gradient()
_forward.register_autograd(_differentiate, setup_context=_keep)


def _fused_bias_gelu(x: Tensor, bias: Tensor, form: GeluForm = "tanh") -> Tensor:
    shapes.check_width("bias", bias, x)
    result: Tensor = _forward(x, bias, form)
    return result


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    return x, torch.randn(shape[-1:], dtype=dtype, device=device, requires_grad=True)


bias_gelu = Operator(name="bias_gelu", reference=_bias_gelu, fused=_fused_bias_gelu, example=_example)
