"""Fused operators for transformers, each with a PyTorch reference implementation of the same signature."""

from neox_kernels.availability import Availability
from neox_kernels.bias_dropout_add import bias_dropout_add
from neox_kernels.bias_gelu import bias_gelu
from neox_kernels.choice import choose
from neox_kernels.errors import KernelBuildError, KernelError, KernelUnavailable
from neox_kernels.gated import bias_geglu, bias_swiglu
from neox_kernels.layer_norm import apex_layer_norm, layer_norm
from neox_kernels.operator import Operator
from neox_kernels.rms_norm import rms_norm
from neox_kernels.rotary import rotary, rotary_
from neox_kernels.scaled_softmax import scaled_causal_softmax, scaled_masked_softmax, scaled_softmax

__all__ = [
    "Availability",
    "KernelBuildError",
    "KernelError",
    "KernelUnavailable",
    "Operator",
    "apex_layer_norm",
    "bias_dropout_add",
    "bias_geglu",
    "bias_gelu",
    "bias_swiglu",
    "choose",
    "layer_norm",
    "rms_norm",
    "rotary",
    "rotary_",
    "scaled_causal_softmax",
    "scaled_masked_softmax",
    "scaled_softmax",
]
