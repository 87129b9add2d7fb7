"""Look up implementations by their configured name, and agree on choices over all ranks."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import distributed

from neox_model.errors import ModelError
from neox_model.parallel.groups import Group

__all__ = ["DTYPES", "all_ranks_agree", "computing_device", "pick"]

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    # Only `neox-launch verify-layout` computes in it.
    "fp64": torch.float64,
}

Choice = TypeVar("Choice")


def pick(table: Mapping[str, Choice], value: str, parameter: str) -> Choice:
    """Return the implementation with the given name.

    Args:
        table: name -> implementation.
        value: the configured name.
        parameter: name of the parameter, for the message.

    Raises:
        ModelError: this version has no implementation with this name.
    """
    if value not in table:
        raise ModelError(
            f"{parameter}: {value!r} has no implementation in this version; set one of {', '.join(table)}"
        )
    return table[value]


def computing_device() -> torch.device:
    """Return the device that this process trains on: its GPU, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_ranks_agree(control: Group, mine: bool) -> bool:
    """Return True if `mine` is True on every rank. Collective over the control group."""
    if control.size == 1:
        return mine
    flag = torch.tensor(int(mine), device="cpu")
    distributed.all_reduce(flag, distributed.ReduceOp.MIN, group=control.process_group)
    return bool(flag.item())
