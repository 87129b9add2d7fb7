"""Fused operators without a GPU: they compute with PyTorch, through the same autograd functions."""

import dataclasses
from collections import Counter
from typing import Any

from neox_kernels import Availability, Operator
from neox_model.assembly import operators

__all__ = ["make_available"]


def make_available(calls: Counter[str]) -> None:
    """Let this process use the fused operators on the CPU, and count their calls."""

    def counted(name: str, form: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return form(*args)

        return call

    for name, operator in list(vars(operators).items()):
        if isinstance(operator, Operator):
            ready = dataclasses.replace(
                operator,
                fused=counted(operator.name, operator.fused),
                with_input=operator.with_input
                and counted(f"{operator.name}.with_input", operator.with_input),
                availability=lambda device, dtype, *, may_build: Availability(True, "for this test"),
            )
            setattr(operators, name, ready)
