"""Activation functions by name; a gated activation uses an `up` and a `gate` projection.

Every function is elementwise, so that a rank can apply it to its part of the width.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "clamped_swiglu"]

Activation = Callable[[Tensor], Tensor]


def _squared_relu(x: Tensor) -> Tensor:
    # Source: arXiv:2109.08668.
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "squared_relu": _squared_relu,
    "softsign": functional.softsign,
    "swish": functional.silu,
    "silu": functional.silu,
    "mish": functional.mish,
}


def _identity(gate: Tensor) -> Tensor:
    return gate


# Activation of the gate; the result is up * activation(gate). Source: arXiv:2002.05202.
GATED_ACTIVATIONS: dict[str, Activation] = {
    "geglu": functional.gelu,
    "geglu_tanh": partial(functional.gelu, approximate="tanh"),
    "swiglu": functional.silu,
    "reglu": functional.relu,
    "glu": torch.sigmoid,
    "bilinear": _identity,
}


def clamped_swiglu(
    up: Tensor,
    gate: Tensor,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    *,
    limit: float | None,
    alpha: float,
    up_offset: float,
) -> Tensor:
    """Return (up + up_offset) * gate * sigmoid(alpha * gate), with both biases added and clamped first.

    Args:
        up: [..., F].
        gate: the same shape.
        up_bias: [F], or None.
        gate_bias: [F], or None.
        limit: the highest gate, and the largest absolute value of up; None: they are not clamped.
        alpha: factor inside the sigmoid.
        up_offset: added to up.

    Source: gpt-oss.
    """
    up, gate = (
        each if bias is None else each + bias.to(each.dtype)
        for each, bias in ((up, up_bias), (gate, gate_bias))
    )
    if limit is not None:
        up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
    return (up + up_offset) * (gate * torch.sigmoid(alpha * gate))
