"""Smaller worlds inside the processes of one launch: four ranks become two pairs, or four of one.

Forming a world takes less time than a launch, and results of one case are at hand for the next: one launch
runs many cases. Both libraries keep what they know of the world in module variables, put back here.
"""

import datetime
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from neox_model.torch_compat import init_process_group

__all__ = ["forget_deepspeeds_world", "world_of"]


@contextmanager
def world_of(size: int, folder: Path, *, name: str) -> Iterator[int]:
    """Within, this process belongs to a world of `size` neighbours; gives which of the worlds it is in.

    Args:
        size: processes of each world; divides those of the launch.
        folder: for the meeting points, shared by all processes.
        name: not used before in this folder.
    """
    rank, launched = dist.get_rank(), dist.get_world_size()
    number = rank // size
    _leave()
    _join(folder / f"{name}-{number}", rank % size, size)
    yield number
    _leave()
    _join(folder / f"{name}-all", rank, launched)


def _join(path: Path, rank: int, size: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    store = dist.FileStore(str(path), size)
    timeout = datetime.timedelta(seconds=300)
    init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    # Who leaves again while another still connects takes the connection away.
    store.add("joined", 1)
    while store.add("joined", 0) < size:
        time.sleep(0.01)


def _leave() -> None:
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        _forget_meshes()
    if "deepspeed" in sys.modules:
        forget_deepspeeds_world()
        _release_engines()


def _release_engines() -> None:
    """Let go of the groups of former engines: gloo's threads poll until a group is freed.

    Hooks on tensors make reference cycles through C++, which Python cannot collect.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

    for held in gc.get_objects():
        # Not isinstance, which asks weak proxies for the class of what they refer to.
        if issubclass(type(held), DeepSpeedEngine | ZeROOptimizer):
            vars(held).clear()
    gc.collect()


def forget_deepspeeds_world() -> None:
    """Let the next engine form its groups, as in a new process."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    comm.cdb = None
    for name, value in vars(groups).items():
        if name.startswith("_") and name.endswith("_GROUP"):
            setattr(groups, name, {} if isinstance(value, dict) else None)
    # Ranks compare the numbers of parameters and modules, which count what a process has made so far.
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


def _forget_meshes() -> None:
    """Let DTensor plan its operations anew: plans name the groups of the world in which they were made."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
