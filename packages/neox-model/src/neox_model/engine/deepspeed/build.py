"""Build DeepSpeed's engine from the configuration, without compiling operators and without printing.

No rank holds the whole model under ZeRO stage 3, which partitions parameters when they are created.
Initialization gathers one parameter at a time. The first replica fills it, and DeepSpeed distributes it.
"""

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from torch import nn
from torch.optim import Optimizer

from neox_config.errors import NeoXError
from neox_config.spec.run import Batch, RunSpec
from neox_config.spec.update import UpdateSpec
from neox_model.engine.build_updater import build_updater, share_masters
from neox_model.engine.contract import Engine, ForwardEngine
from neox_model.engine.deepspeed.compat import (
    allow_any_precision,
    disable_compilation,
    forget_process_group,
    is_partitioned,
    keep_gradients,
    why_not_async_io,
)
from neox_model.engine.deepspeed.engines import PipelineEngine, PipelineForward, PlainEngine
from neox_model.engine.deepspeed.pipeline import build_stages
from neox_model.engine.deepspeed.zero import ZeroUpdate
from neox_model.engine.updater import Updater
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups

__all__ = [
    "build",
    "build_forward",
    "build_stages",
    "forget_process_group",
    "gathered",
    "model_parallel_unit",
    "partitioned_as_built",
    "prepare",
]

logger = logging.getLogger(__name__)


def prepare() -> None:
    """Initialize DeepSpeed's communication on torch's process group."""
    disable_compilation()
    deepspeed.init_distributed(verbose=False)


def build(
    run: RunSpec,
    update: UpdateSpec,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> Engine:
    """Build DeepSpeed's engine with our optimizer and schedule (see `build_engine`).

    Under ZeRO stage 0 our optimizer makes the updates in every precision, and DeepSpeed's engine runs in
    float32 mode. DeepSpeed's 16-bit wrappers are used under ZeRO only.
    """
    build_update = _build_own if run.layout.zero == 0 else _build_zero
    inner, applied = build_update(run, update, model, optimizer, schedule, groups)
    if run.layout.is_pipeline:
        return PipelineEngine(inner, applied, groups)
    return PlainEngine(inner, applied, groups.data)


def build_forward(batch: Batch, model: nn.Module, *, groups: Groups) -> ForwardEngine:
    """Build a pipeline engine for evaluation only; the model keeps its dtype and device."""
    settings = {
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": 1,
        # Each tensor-parallel rank sends the activations that it holds, copies or parts.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    with _quiet():
        inner, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    return PipelineForward(inner, groups)


def partitioned_as_built(run: RunSpec, groups: Groups) -> Any:
    """Return a context manager that partitions each new parameter as soon as it is created.

    Raises:
        NeoXError: DeepSpeed was installed without an operator that the configuration requires.
    """
    settings = _settings(run)
    _refuse_without_operators(settings["zero_optimization"])
    return deepspeed.zero.Init(
        data_parallel_group=groups.data.process_group,
        config_dict_or_path=settings,
        mpu=model_parallel_unit(groups),
    )


@contextlib.contextmanager
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


def _build_own(
    run: RunSpec,
    chosen: UpdateSpec,
    model: Any,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    groups: Groups,
) -> tuple[Any, Updater]:
    """Build the engine for stage 0: our optimizer sums, reduces and applies gradients."""
    is_pipeline = run.layout.is_pipeline
    # Weights may have been initialized on the host; master weights must be on the device.
    model.to(torch.device(get_accelerator().current_device_name()))
    ties = model.take_over_ties() if is_pipeline else ()
    update = build_updater(run, chosen, model, optimizer, schedule, groups=groups, ties=ties)
    # DeepSpeed wraps an optimizer object, but uses the optimizer that a function returns unchanged.
    inner = _initialize(run, model, groups, optimizer=lambda parameters: update.mixed)
    keep_gradients(inner, is_pipeline=is_pipeline)
    # DeepSpeed broadcasts the model's weights, which in float32 are the master weights.
    if update.mixed.masters is not update.mixed.parameters:
        share_masters(update.mixed, groups)
    return inner, update


def _build_zero(
    run: RunSpec,
    chosen: UpdateSpec,
    model: Any,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    groups: Groups,
) -> tuple[Any, ZeroUpdate]:
    """Build the engine for stages 1 to 3, with DeepSpeed's ZeRO optimizers."""
    inner = _initialize(run, model, groups, optimizer=optimizer, lr_scheduler=schedule)
    scaling, floor = chosen.scaling, None
    if scaling is not None:
        floor = scaling.minimum if scaling.is_dynamic else scaling.initial
    return inner, ZeroUpdate(inner, min_loss_scale=floor)


def _settings(run: RunSpec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.engine.settings)
    return found


def _initialize(run: RunSpec, model: Any, groups: Groups, **parts: Any) -> Any:
    with _quiet(), allow_any_precision():
        inner, *_ = deepspeed.initialize(
            model=model,
            mpu=None if run.layout.is_pipeline else model_parallel_unit(groups),
            config=_settings(run),
            dist_init_required=False,
            **parts,
        )
    return inner


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log what DeepSpeed prints while it builds an engine, at level debug."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        logger.debug("DeepSpeed: %s", printed.getvalue().strip())


# pip would otherwise install the wheel that it built before, without operators.
_BUILD = "pip install --no-cache-dir --no-build-isolation --no-deps --force-reinstall deepspeed==0.19.8"
# Without CUDA, DeepSpeed does not link libaio itself.
_BUILD_AIO = f"DS_BUILD_AIO=1 DS_BUILD_PIN_MEMORY=1 LDFLAGS='-Wl,--no-as-needed -laio' {_BUILD}"


def _refuse_without_operators(zero: dict[str, Any]) -> None:
    """Raise an error if an operator of DeepSpeed is missing; nothing is compiled when a run starts."""
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


def model_parallel_unit(groups: Groups) -> SimpleNamespace:
    """Return DeepSpeed's view of groups: `get_model_parallel_rank`, `get_data_parallel_group`, ...

    Used with the plain model only: a pipeline has its own grid. DeepSpeed sums gradient norms over the "model
    parallel" group, counting parameters without `model_parallel = True` on its rank 0 only.
    """
    kinds = {"model": groups.model, "tensor_model": groups.model, "data": groups.data, "pipe": groups.pipe}
    unit = SimpleNamespace(get_data_parallel_group_ranks=partial(list, groups.data.ranks))
    for kind, group in kinds.items():
        for suffix, attribute in (("rank", "rank"), ("world_size", "size"), ("group", "process_group")):
            setattr(unit, f"get_{kind}_parallel_{suffix}", partial(getattr, group, attribute))
    return unit
