"""Partitioned parameters of DeepSpeed's ZeRO stage 3.

No rank ever holds the whole model. Initialization gathers one parameter at a time; the first replica fills it
and DeepSpeed distributes the parts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
from deepspeed.git_version_info import installed_ops
from torch import nn

from neox_config.errors import NeoXError
from neox_model.deepspeed_compat import is_partitioned, why_not_async_io
from neox_model.parallel.groups import Groups
from neox_model.parallel.mpu import model_parallel_unit

__all__ = ["gathered", "partitioning"]


def partitioning(groups: Groups, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return a context manager that partitions each parameter of new modules as soon as it is created.

    Args:
        groups: this job's process groups.
        settings: the dict for `deepspeed.initialize`.

    Raises:
        NeoXError: DeepSpeed was installed without an operator that the configuration requires.
    """
    _refuse_without_operators(settings["zero_optimization"])
    return deepspeed.zero.Init(
        data_parallel_group=groups.data.process_group,
        config_dict_or_path=settings,
        mpu=model_parallel_unit(groups),
    )


@contextmanager
def gathered(parameter: nn.Parameter, *, is_first: bool) -> Iterator[bool]:
    """Gather a parameter's memory; yield True if this rank's values are the ones that are kept.

    Args:
        parameter: any parameter; nothing is done if it is not partitioned.
        is_first: whether this rank is the first replica.
    """
    if not is_partitioned(parameter):
        yield True
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield is_first


# pip would otherwise install the wheel that it built before, without operators.
_BUILD = "pip install --no-cache-dir --no-build-isolation --no-deps --force-reinstall deepspeed==0.19.8"
# Without CUDA, DeepSpeed does not link libaio itself.
_BUILD_AIO = f"DS_BUILD_AIO=1 DS_BUILD_PIN_MEMORY=1 LDFLAGS='-Wl,--no-as-needed -laio' {_BUILD}"


def _refuse_without_operators(zero: dict[str, Any]) -> None:
    """Raise an error if an operator of DeepSpeed is missing; nothing is compiled when a training starts."""
    for block in ("offload_param", "offload_optimizer"):
        reason = why_not_async_io() if zero.get(block, {}).get("device") == "nvme" else None
        if reason is not None:
            raise NeoXError(
                f"zero_optimization.{block}.device: nvme requires DeepSpeed's operator async_io, which "
                f"{reason}; install libaio (Debian: libaio-dev), then run tools/aio.sh, or install DeepSpeed "
                f"with {_BUILD_AIO}, or use device: cpu"
            )
    if zero["zero_quantized_weights"] and not installed_ops.get("quantizer"):
        raise NeoXError(
            "zero_optimization.zero_quantized_weights: true requires DeepSpeed's operator quantizer, which "
            f"is not installed; install DeepSpeed with DS_BUILD_QUANTIZER=1 {_BUILD} where CUDA's compiler "
            "is, or remove it"
        )
