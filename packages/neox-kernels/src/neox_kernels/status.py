"""How each operator stands on this machine: available or why not, right or not, and how fast."""

from typing import Any

import torch

from neox_kernels import trial
from neox_kernels.bias_dropout_add import bias_dropout_add
from neox_kernels.bias_gelu import bias_gelu
from neox_kernels.gated import bias_geglu, bias_swiglu
from neox_kernels.layer_norm import apex_layer_norm, layer_norm
from neox_kernels.operator import Operator
from neox_kernels.rms_norm import rms_norm
from neox_kernels.rotary import rotary, rotary_
from neox_kernels.scaled_softmax import scaled_causal_softmax, scaled_masked_softmax, scaled_softmax

__all__ = ["OPERATORS", "describe", "typical_shape"]

OPERATORS: tuple[Operator[..., Any], ...] = (
    scaled_causal_softmax,
    scaled_masked_softmax,
    scaled_softmax,
    bias_gelu,
    bias_swiglu,
    bias_geglu,
    bias_dropout_add,
    rotary,
    rotary_,
    layer_norm,
    rms_norm,
    apex_layer_norm,
)


def typical_shape(operator: Operator[..., Any]) -> tuple[int, ...]:
    """A shape of the first argument as a model of medium size has it."""
    if "softmax" in operator.name:
        return 4, 16, 2048, 2048
    if "rotary" in operator.name:
        return 2048, 4, 32, 128
    return 2048, 4, 4096


def describe(operator: Operator[..., Any], dtype: torch.dtype) -> str:
    """One line: why it is not available; or whether it is right, and how fast against its twin."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    availability = operator.available(device=device, dtype=dtype)
    if not availability.ok:
        return f"not available: {availability.reason}"
    shape = typical_shape(operator)
    make_comparable = operator.comparable_example or operator.example
    difference = trial.disagreement(operator, make_comparable(shape, dtype, device))
    if difference is not None:
        return f"WRONG: {difference}"
    timing = trial.time_forms(operator, operator.example(shape, dtype, device))
    return (
        f"right; {timing.fused_ms:.3f} ms against {timing.compiled_ms:.3f} ms of the plain form under "
        f"torch.compile ({shape}, {dtype})"
    )
