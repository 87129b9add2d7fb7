"""Fused operators for transformers, each with a PyTorch reference implementation of the same signature.

The operators are loaded on first use, because torch takes seconds to import; errors and builds need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from neox_kernels.availability import Availability
from neox_kernels.errors import KernelBuildError, KernelError, KernelUnavailable

if TYPE_CHECKING:
    from neox_kernels.choice import choose
    from neox_kernels.operator import Operator
    from neox_kernels.operators.bias_dropout_add import bias_dropout_add
    from neox_kernels.operators.bias_gelu import bias_gelu
    from neox_kernels.operators.cross_entropy import cross_entropy
    from neox_kernels.operators.gated import bias_geglu, bias_geglu_tanh, bias_swiglu
    from neox_kernels.operators.layer_norm import add_layer_norm, apex_layer_norm, layer_norm
    from neox_kernels.operators.rms_norm import add_rms_norm, rms_norm
    from neox_kernels.operators.rotary import rotary, rotary_, split_rotary
    from neox_kernels.operators.scaled_softmax import (
        scaled_causal_softmax,
        scaled_masked_softmax,
        scaled_softmax,
    )

__all__ = [
    "Availability",
    "KernelBuildError",
    "KernelError",
    "KernelUnavailable",
    "Operator",
    "add_layer_norm",
    "add_rms_norm",
    "apex_layer_norm",
    "bias_dropout_add",
    "bias_geglu",
    "bias_geglu_tanh",
    "bias_gelu",
    "bias_swiglu",
    "choose",
    "cross_entropy",
    "layer_norm",
    "rms_norm",
    "rotary",
    "rotary_",
    "scaled_causal_softmax",
    "scaled_masked_softmax",
    "scaled_softmax",
    "split_rotary",
]

_MODULES = {
    "Operator": "operator",
    "add_layer_norm": "operators.layer_norm",
    "add_rms_norm": "operators.rms_norm",
    "apex_layer_norm": "operators.layer_norm",
    "bias_dropout_add": "operators.bias_dropout_add",
    "bias_geglu": "operators.gated",
    "bias_geglu_tanh": "operators.gated",
    "bias_gelu": "operators.bias_gelu",
    "bias_swiglu": "operators.gated",
    "choose": "choice",
    "cross_entropy": "operators.cross_entropy",
    "layer_norm": "operators.layer_norm",
    "rms_norm": "operators.rms_norm",
    "rotary": "operators.rotary",
    "rotary_": "operators.rotary",
    "scaled_causal_softmax": "operators.scaled_softmax",
    "scaled_masked_softmax": "operators.scaled_softmax",
    "scaled_softmax": "operators.scaled_softmax",
    "split_rotary": "operators.rotary",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"neox_kernels.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
