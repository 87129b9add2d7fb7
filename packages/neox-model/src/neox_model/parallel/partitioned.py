"""Parameters that `fully_shard` may have partitioned, read without importing it, which takes a second.

Nothing is partitioned in a process in which torch's modules for it were not imported (`sharding.py`).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from neox_model.parallel.param_shard import first_row

__all__ = ["class_name", "gathered", "is_sharded", "own_rows_of", "whole_tensor"]


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, also if `fully_shard` has put its own class in its place."""
    own = (each for each in type(module).__mro__ if not each.__name__.startswith("FSDP"))
    return next(own).__name__


def is_sharded(parameter: Tensor) -> bool:
    """Return True if `fully_shard` partitions the parameter."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


@torch.no_grad()
def whole_tensor(parameter: Tensor) -> Tensor:
    """Return a copy of a sharded parameter, of its whole shape. Collective over the data group."""
    assert is_sharded(parameter), "not sharded"
    whole: Tensor = parameter.full_tensor()  # type: ignore[attr-defined]
    return whole


@contextmanager
def own_rows_of(parameter: Tensor) -> Iterator[Tensor]:
    """Yield a new tensor of a sharded parameter's whole shape; this rank keeps its rows of the values."""
    assert is_sharded(parameter), "not sharded"
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    yield whole
    with torch.no_grad():
        local, mesh = parameter.to_local(), parameter.device_mesh  # type: ignore[attr-defined]
        first = first_row(len(parameter), rank=mesh.get_local_rank(), size=mesh.size())
        local.copy_(whole[first : first + len(local)])


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep the whole parameters of a partitioned model, so that its layers run without communication.

    Collective over the data group before the block; nothing is done for a model that is not partitioned.
    Afterwards parameters are partitioned again, also if a pass in the block failed. Layers must not free
    their parameters between forward and backward pass.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, fsdp.FSDPModule):
        yield
        return
    root: Any = model
    for part in model.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.unshard()
    root.set_reshard_after_backward(False)
    try:
        yield
    finally:
        root.set_reshard_after_backward(True)
        # It frees parameters, too, where `reshard` takes a pass that failed for one that is under way.
        root.reset_iter_state()
