"""Random streams: dropout agrees on tensor-parallel ranks where they hold the same thing, else differs.

torch's default generators are the shared stream: seeded alike on all tensor-parallel ranks of a stage and a
replica. Inside `split_stream` the default generators are replaced for a moment by ones whose seed is drawn
from the shared stream and mixed with the rank. So there is no state beyond the default generators':
whatever saves and restores those (checkpoints, activation checkpointing) gets both streams right.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from neox_model.parallel.groups import Group, Groups
from neox_model.parallel.uncompiled import Uncompiled

__all__ = ["UNCOMPILED", "in_split_stream", "mixed_seed", "seed_streams", "split_stream"]

_SEED_LIMIT = 1 << 62


def mixed_seed(*parts: object) -> int:
    """A number below 2**62 that depends on all of `parts`, the same in every process and on every machine."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") % _SEED_LIMIT


def seed_streams(seed: int, groups: Groups) -> None:
    """Start the default generators of Python, NumPy and torch.

    Alike within a tensor-parallel group, apart for stages and replicas.
    """
    shared = mixed_seed("stream", seed, groups.pipe.rank, groups.data.rank)
    random.seed(shared)
    np.random.seed(shared % (1 << 32))
    torch.manual_seed(shared)


@contextmanager
def split_stream(group: Group, device: torch.device) -> Iterator[None]:
    """Within, random numbers on the CPU and on `device` differ between the ranks of the group.

    The seed comes from the CPU's shared stream, so that no device is waited for; every rank of the group
    must enter together. In a group of one this does nothing.
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
    """What the function gives within `split_stream`; the form that a layer which may be compiled uses."""
    return function() if group.size == 1 else _in_split_stream(group, device, function)


def _call_in_split_stream(group: Group, device: torch.device, function: Callable[[], Tensor]) -> Tensor:
    with split_stream(group, device):
        return function()


_in_split_stream = Uncompiled(_call_in_split_stream)
UNCOMPILED = (_in_split_stream,)
