"""Random streams: dropout is equal on tensor-parallel ranks with equal activations, and differs otherwise.

torch's default generators are the shared stream, seeded equally on all tensor-parallel ranks of a stage and a
replica. Inside `split_stream` the default generators are replaced temporarily by ones whose seed is drawn
from the shared stream and mixed with the rank. There is no state other than that of the default generators,
so saving and restoring these (checkpoints, activation checkpointing) restores both streams.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from neox_model.parallel.compile_disabled import CompileDisabled
from neox_model.parallel.groups import Group, Groups

__all__ = ["COMPILE_DISABLED", "in_split_stream", "mixed_seed", "seed_streams", "split_stream"]

_SEED_LIMIT = 1 << 62


def mixed_seed(*parts: object) -> int:
    """Return a number below 2**62 that depends on all `parts`, the same in every process and machine."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") % _SEED_LIMIT


def seed_streams(seed: int, groups: Groups) -> None:
    """Seed the default generators of Python, NumPy and torch.

    Seeds are equal within a tensor-parallel group, and differ between stages and replicas.
    """
    shared = mixed_seed("stream", seed, groups.pipe.rank, groups.data.rank)
    random.seed(shared)
    np.random.seed(shared % (1 << 32))
    torch.manual_seed(shared)


@contextmanager
def split_stream(group: Group, device: torch.device) -> Iterator[None]:
    """Within this context, random numbers on the CPU and on `device` differ between the ranks of the group.

    The seed is drawn from the CPU's shared stream, to avoid synchronization; all ranks of the group must
    enter together. In a group of one this does nothing.
    """
    if group.size == 1:
        yield
        return
    drawn = int(torch.randint(_SEED_LIMIT, (), dtype=torch.int64, device="cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        torch.manual_seed(mixed_seed("split", drawn, group.rank))
        yield


def in_split_stream(group: Group, device: torch.device, function: Callable[[], Tensor]) -> Tensor:
    """Call a function within `split_stream`; for layers that may be compiled."""
    return function() if group.size == 1 else _in_split_stream(group, device, function)


def _call_in_split_stream(group: Group, device: torch.device, function: Callable[[], Tensor]) -> Tensor:
    with split_stream(group, device):
        return function()


_in_split_stream = CompileDisabled(_call_in_split_stream)
COMPILE_DISABLED = (_in_split_stream,)
