"""Status of each operator on this machine: availability, correctness and speed."""

from typing import Any

import torch

from neox_kernels import choice
from neox_kernels.operator import Operator
from neox_kernels.operators.bias_dropout_add import bias_dropout_add
from neox_kernels.operators.bias_gelu import bias_gelu
from neox_kernels.operators.cross_entropy import cross_entropy
from neox_kernels.operators.gated import bias_geglu, bias_geglu_tanh, bias_swiglu
from neox_kernels.operators.layer_norm import add_layer_norm, apex_layer_norm, layer_norm
from neox_kernels.operators.rms_norm import add_rms_norm, rms_norm
from neox_kernels.operators.rotary import rotary, rotary_, split_rotary
from neox_kernels.operators.scaled_softmax import scaled_causal_softmax, scaled_masked_softmax, scaled_softmax

__all__ = ["OPERATORS", "describe", "typical_shape"]

OPERATORS: tuple[Operator[..., Any], ...] = (
    scaled_causal_softmax,
    scaled_masked_softmax,
    scaled_softmax,
    bias_gelu,
    bias_swiglu,
    bias_geglu,
    bias_geglu_tanh,
    bias_dropout_add,
    rotary,
    rotary_,
    split_rotary,
    layer_norm,
    add_layer_norm,
    rms_norm,
    add_rms_norm,
    cross_entropy,
    apex_layer_norm,
)


def typical_shape(operator: Operator[..., Any]) -> tuple[int, ...]:
    """Return a typical shape of the first argument, as in a medium-sized model."""
    if "softmax" in operator.name:
        return 4, 16, 2048, 2048
    if "rotary" in operator.name:
        return 2048, 4, 32, 128
    if operator is cross_entropy:
        return 1024, 50304
    return 2048, 4, 4096


def describe(operator: Operator[..., Any], dtype: torch.dtype) -> str:
    """Describe an operator in one line: why it is unavailable, or its correctness and speed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    availability = operator.available(device=device, dtype=dtype)
    if not availability.ok:
        return f"unavailable: {availability.reason}"
    shape = typical_shape(operator)
    make_comparable = operator.comparable_example or operator.example
    difference = choice.disagreement(operator, make_comparable(shape, dtype, device))
    if difference is not None:
        return f"WRONG: {difference}"
    arguments = operator.example(shape, dtype, device)
    fused_ms, reference_ms = choice.time_forms(operator, arguments)
    compiled_ms = choice.compiled_ms(operator, arguments)
    compiled = "" if compiled_ms is None else f", compiled {compiled_ms:.3f} ms"
    return f"correct; {fused_ms:.3f} ms, reference {reference_ms:.3f} ms{compiled} ({shape}, {dtype})"
