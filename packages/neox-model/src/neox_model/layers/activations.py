"""Activation functions by name; a gated activation uses an `up` and a `gate` projection.

Every function is elementwise, so that a rank can apply it to its part of the width.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS"]

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
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
    "swiglu": functional.silu,
    "reglu": functional.relu,
    "glu": torch.sigmoid,
    "bilinear": _identity,
}
