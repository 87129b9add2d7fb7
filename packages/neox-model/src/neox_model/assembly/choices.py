"""The types and the device of a run, and choices that all ranks agree on."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed import ReduceOp

from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import Group

__all__ = ["DTYPES", "Autocast", "all_ranks_agree", "build_autocast", "computing_device"]

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    # Only `neox-launch verify-layout` computes in it.
    "fp64": torch.float64,
}


def computing_device() -> torch.device:
    """Return the device that this process trains on: its GPU, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# Returns a new context at each call.
Autocast = Callable[[], AbstractContextManager[Any]]


def build_autocast(dtype: str | None, device: torch.device) -> Autocast:
    """Build a context that computes matrix products in a type of `DTYPES`; None: one without effect.

    Weights and gradients stay in float32. The models themselves enter it, in `forward` and around the loss
    of a pipeline's last stage, so that training, evaluation, generation and recomputation compute alike.
    """
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype=DTYPES[dtype])


def all_ranks_agree(control: Group, mine: bool) -> bool:
    """Return True if `mine` is True on every rank. Collective over the control group."""
    flag = torch.tensor(int(mine), device="cpu")
    return bool(all_reduce(flag, control, ReduceOp.MIN).item())
