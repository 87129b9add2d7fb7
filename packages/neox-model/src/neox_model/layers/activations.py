"""Activation functions by name; a gated one takes the `up` and the `gate` projection.

Every function here is elementwise, so that a rank may apply it to its own part of the width.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "is_gated"]

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

# What the gate goes through; the result is up * activation(gate). Source: arXiv:2002.05202.
GATED_ACTIVATIONS: dict[str, Activation] = {
    "geglu": functional.gelu,
    "swiglu": functional.silu,
    "reglu": functional.relu,
}


def is_gated(name: str) -> bool:
    """Whether the activation of that name needs a second input projection."""
    return name in GATED_ACTIVATIONS
