"""Status of each operator on this machine: availability, correctness and speed."""

from typing import Any

import torch

import neox_kernels
from neox_kernels import choice
from neox_kernels.operator import Operator

__all__ = ["OPERATORS", "describe", "typical_shape"]

_EXPORTED = [getattr(neox_kernels, name) for name in neox_kernels.__all__]
OPERATORS: tuple[Operator[..., Any], ...] = tuple(each for each in _EXPORTED if isinstance(each, Operator))


def typical_shape(operator: Operator[..., Any]) -> tuple[int, ...]:
    """Return a typical shape of the first argument, as in a medium-sized model."""
    if "softmax" in operator.name:
        return 4, 16, 2048, 2048
    if "rotary" in operator.name:
        return 2048, 4, 32, 128
    if operator.name == "cross_entropy":
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
    return f"correct; {fused_ms:.3f} ms, reference {reference_ms:.3f} ms ({shape}, {dtype})"
