"""Fused gated activations with biases: SwiGLU and GeGLU.

    y = u f(g),      u = up + up_bias,  g = gate + gate_bias,      f = SiLU (z sigmoid(z)) or GELU
    d up = f(g) dy,  d gate = u f'(g) dy,  and the biases' gradients are their sums over rows

The two inputs may be halves of one matrix; they are then read without a copy. `Operator.again` returns y with
the gradients, so that a matrix product with y need not keep it for its backward pass.

Source: arXiv:2002.05202; GELU: bias_gelu.py.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from neox_kernels import native, shapes
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.operators.bias_gelu import GeluForm, gelu, gelu_slope
from neox_kernels.precision import widen

__all__ = ["bias_geglu", "bias_geglu_tanh", "bias_swiglu"]

ACTIVATION_CODES = {"silu": 0, "tanh": 1, "erf": 2}


def _activation(z: Tensor, name: str) -> Tensor:
    return F.silu(z) if name == "silu" else gelu(z, name)


def _slope(z: Tensor, name: str) -> Tensor:
    if name != "silu":
        return gelu_slope(z, name)
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return widen(x) if bias is None else widen(x) + widen(bias)


def _gated(up: Tensor, gate: Tensor, up_bias: Tensor | None, gate_bias: Tensor | None, name: str) -> Tensor:
    return (_biased(up, up_bias) * _activation(_biased(gate, gate_bias), name)).to(up.dtype)


def _bias_swiglu(
    up: Tensor, gate: Tensor, up_bias: Tensor | None = None, gate_bias: Tensor | None = None
) -> Tensor:
    """Compute `(up + up_bias) * silu(gate + gate_bias)`.

    Args:
        up: any shape `[..., F]`.
        gate: same shape.
        up_bias: `[F]`, or None.
        gate_bias: `[F]`, or None.

    Returns:
        Tensor with the shape and dtype of `up`.
    """
    return _gated(up, gate, up_bias, gate_bias, "silu")


def _bias_geglu(
    up: Tensor,
    gate: Tensor,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    form: GeluForm = "erf",
) -> Tensor:
    """Compute `(up + up_bias) * gelu(gate + gate_bias)`.

    Args:
        up: any shape `[..., F]`.
        gate: same shape.
        up_bias: `[F]`, or None.
        gate_bias: `[F]`, or None.
        form: "erf" (exact) or "tanh" (approximation).

    Returns:
        Tensor with the shape and dtype of `up`.
    """
    return _gated(up, gate, up_bias, gate_bias, form)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


@custom_operator("gated_forward", like=("up",))
def _forward(up: Tensor, gate: Tensor, up_bias: Tensor | None, gate_bias: Tensor | None, name: str) -> Tensor:
    compiled = native.compiled_for(up, gate, up_bias, gate_bias)
    if compiled is None:
        return _gated(up, gate, up_bias, gate_bias, name).contiguous()
    (up, up_stride), (gate, gate_stride) = shapes.as_rows(up), shapes.as_rows(gate)
    up_bias, gate_bias = _contiguous(up_bias), _contiguous(gate_bias)
    result = torch.empty_like(up, memory_format=torch.contiguous_format)
    compiled.gated_forward(
        *native.site(up), ACTIVATION_CODES[name], up.data_ptr(), up_stride, gate.data_ptr(), gate_stride,
        native.parameter(up_bias), native.parameter(gate_bias), result.data_ptr(), shapes.rows(up),
        shapes.columns(up),
    )  # fmt: skip
    return result


_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _empty_gradients(
    up: Tensor, up_bias: Tensor | None, gate_bias: Tensor | None, with_product: bool
) -> _Gradients:
    wide = torch.contiguous_format
    return (
        torch.empty_like(up, memory_format=wide) if with_product else up.new_empty(0),
        torch.empty_like(up, memory_format=wide),
        torch.empty_like(up, memory_format=wide),
        up.new_empty(0) if up_bias is None else torch.empty_like(up_bias, memory_format=wide),
        up.new_empty(0) if gate_bias is None else torch.empty_like(gate_bias, memory_format=wide),
    )


def _plain_backward(
    gradient: Tensor,
    up: Tensor,
    gate: Tensor,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    name: str,
    with_product: bool,
) -> _Gradients:
    above, u, g = widen(gradient), _biased(up, up_bias), _biased(gate, gate_bias)
    of_up, of_gate = above * _activation(g, name), above * u * _slope(g, name)
    return (
        _gated(up, gate, up_bias, gate_bias, name).contiguous() if with_product else up.new_empty(0),
        of_up.to(up.dtype).contiguous(),
        of_gate.to(gate.dtype).contiguous(),
        up.new_empty(0) if up_bias is None else shapes.sum_rows(of_up).to(up_bias.dtype),
        up.new_empty(0) if gate_bias is None else shapes.sum_rows(of_gate).to(gate_bias.dtype),
    )


@custom_operator("gated_backward")
def _backward(
    gradient: Tensor,
    up: Tensor,
    gate: Tensor,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    name: str,
    with_product: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the product, and the gradients of up, gate and their biases; empty for what is not requested."""
    compiled = native.compiled_for(gradient, up, gate, up_bias, gate_bias)
    if compiled is None:
        return _plain_backward(gradient, up, gate, up_bias, gate_bias, name, with_product)
    gradient = gradient.contiguous()
    (up, up_stride), (gate, gate_stride) = shapes.as_rows(up), shapes.as_rows(gate)
    up_bias, gate_bias = _contiguous(up_bias), _contiguous(gate_bias)
    results = _empty_gradients(up, up_bias, gate_bias, with_product)
    product, of_up, of_gate, of_up_bias, of_gate_bias = results
    place, rows, columns = native.site(up), shapes.rows(up), shapes.columns(up)
    count, partials = 0, None
    if up_bias is not None or gate_bias is not None:
        count = compiled.gated_partial_rows(place[0], place[2], ACTIVATION_CODES[name], rows, columns)
        partials = native.partials(up, 2 * count, columns)
    compiled.gated_backward(
        *place, ACTIVATION_CODES[name], gradient.data_ptr(), up.data_ptr(), up_stride, gate.data_ptr(),
        gate_stride, native.parameter(up_bias), native.parameter(gate_bias), of_up.data_ptr(),
        of_gate.data_ptr(), product.data_ptr() if with_product else 0,
        native.parameter(None if up_bias is None else of_up_bias),
        native.parameter(None if gate_bias is None else of_gate_bias),
        0 if partials is None else partials.data_ptr(), count, rows, columns,
    )  # fmt: skip
    return results


@_backward.register_fake
def _(
    gradient: Tensor,
    up: Tensor,
    gate: Tensor,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    name: str,
    with_product: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(up, up_bias, gate_bias, with_product)


def _again(
    name: str,
    gradient: Tensor,
    up: Tensor,
    gate: Tensor,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the product, and the gradients of up, gate and their biases; None for a bias that is None."""
    product, *of_inputs = _backward(gradient, up, gate.to(up.dtype), up_bias, gate_bias, name, True)
    return product, *_of_present(of_inputs, up_bias, gate_bias)


def _of_present(
    gradients: Sequence[Tensor], up_bias: Tensor | None, gate_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of up, gate and their biases, with None for a bias that is None."""
    of_up, of_gate, of_up_bias, of_gate_bias = gradients
    return (
        of_up,
        of_gate,
        None if up_bias is None else of_up_bias,
        None if gate_bias is None else of_gate_bias,
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.name = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None]:
    up, gate, up_bias, gate_bias = ctx.saved_tensors
    _, *of_inputs = _backward(gradient, up, gate, up_bias, gate_bias, ctx.name, False)
    return *_of_present(of_inputs, up_bias, gate_bias), None


_backward.refuse_gradient()
_forward.register_autograd(_differentiate, setup_context=_keep)


def _checked(up: Tensor, gate: Tensor, up_bias: Tensor | None, gate_bias: Tensor | None, name: str) -> Tensor:
    shapes.check_equal("up", up, "gate", gate)
    for label, bias in (("up_bias", up_bias), ("gate_bias", gate_bias)):
        if bias is not None:
            shapes.check_width(label, bias, up)
    result: Tensor = _forward(up, gate.to(up.dtype), up_bias, gate_bias, name)
    return result


def _fused_bias_swiglu(
    up: Tensor, gate: Tensor, up_bias: Tensor | None = None, gate_bias: Tensor | None = None
) -> Tensor:
    return _checked(up, gate, up_bias, gate_bias, "silu")


def _fused_bias_geglu(
    up: Tensor,
    gate: Tensor,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    form: GeluForm = "erf",
) -> Tensor:
    return _checked(up, gate, up_bias, gate_bias, form)


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return tuple(
        torch.randn(size, dtype=dtype, device=device, requires_grad=True)
        for size in (shape, shape, shape[-1:], shape[-1:])
    )


bias_swiglu = Operator(
    name="bias_swiglu",
    reference=_bias_swiglu,
    fused=_fused_bias_swiglu,
    example=_example,
    again=partial(_again, "silu"),
)
bias_geglu = Operator(
    name="bias_geglu",
    reference=_bias_geglu,
    fused=_fused_bias_geglu,
    example=_example,
    again=partial(_again, "erf"),
)
bias_geglu_tanh = Operator(
    name="bias_geglu_tanh",
    reference=partial(_bias_geglu, form="tanh"),
    fused=partial(_fused_bias_geglu, form="tanh"),
    example=_example,
    again=partial(_again, "tanh"),
)
