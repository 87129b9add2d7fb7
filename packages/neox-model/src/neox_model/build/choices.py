"""Looking a configured name up among the implementations, and choosing alike on every rank."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import distributed

from neox_model.errors import ModelError
from neox_model.parallel.groups import Group

__all__ = ["DTYPES", "all_say_so", "pick"]

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Choice = TypeVar("Choice")


def pick(table: Mapping[str, Choice], value: str, parameter: str) -> Choice:
    """The implementation of that name.

    Args:
        table: name -> implementation.
        value: the configured name.
        parameter: whose value it is, for the message.

    Raises:
        ModelError: this version has none of that name.
    """
    if value not in table:
        raise ModelError(
            f"{parameter}: {value!r} has no implementation in this version; choose one of {', '.join(table)}"
        )
    return table[value]


def all_say_so(control: Group, mine: bool) -> bool:
    """Whether every rank says True. Collective over the control group."""
    if control.size == 1:
        return mine
    flag = torch.tensor(int(mine), device="cpu")
    distributed.all_reduce(flag, distributed.ReduceOp.MIN, group=control.process_group)
    return bool(flag.item())
