"""ZeRO stage 3 while the model is made: each parameter is shared out as soon as it exists.

No rank ever holds the model. Filling gathers one parameter at a time; the first replica fills it and
DeepSpeed hands the parts out.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import deepspeed
from deepspeed.git_version_info import installed_ops
from torch import nn

from neox_launcher.config import Resolved
from neox_launcher.errors import NeoXError
from neox_model.parallel.groups import Groups
from neox_model.parallel.mpu import ModelParallelUnit

__all__ = ["shared_construction", "whole_parameter", "without_zero"]


def without_zero(resolved: Resolved) -> Resolved:
    """The same configuration at stage 0, for programs that have no optimizer to share out."""
    zero = resolved.config.zero
    plain = zero.replaced(zero_optimization=zero.zero_optimization.replaced(stage=0))
    return replace(resolved, config=resolved.config.model_copy(update={"zero": plain}))


def shared_construction(stage: int, groups: Groups, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Within, parameters of new modules are shared out over the replicas; nothing below stage 3.

    Args:
        stage: ZeRO stage.
        groups: this job's.
        settings: the dict for `deepspeed.initialize`.

    Raises:
        NeoXError: something is to be kept on NVMe, and DeepSpeed was installed without the operator for it.
    """
    if stage < 3:
        return nullcontext()
    _refuse_nvme_without_its_operator(settings["zero_optimization"])
    return deepspeed.zero.Init(
        data_parallel_group=groups.data.process_group,
        config_dict_or_path=settings,
        mpu=ModelParallelUnit(groups),
    )


def _refuse_nvme_without_its_operator(zero: dict[str, Any]) -> None:
    for block in ("offload_param", "offload_optimizer"):
        if zero.get(block, {}).get("device") == "nvme" and not installed_ops.get("async_io"):
            raise NeoXError(
                f"zero_optimization.{block}.device: nvme needs DeepSpeed's operator async_io, which is not "
                "installed here; install libaio, then DeepSpeed with DS_BUILD_AIO=1 DS_BUILD_PIN_MEMORY=1, "
                "or use device: cpu"
            )


@contextmanager
def whole_parameter(parameter: nn.Parameter, groups: Groups) -> Iterator[bool]:
    """Within, this rank has the parameter's memory; gives whether this rank's values are the ones kept."""
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield groups.data.rank == 0
