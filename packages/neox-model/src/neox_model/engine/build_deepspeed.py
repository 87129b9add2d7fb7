"""Build DeepSpeed's engine from the configuration, without compiling operators and without printing."""

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.optim import Optimizer

from neox_config.spec.run import Batch, RunSpec
from neox_config.spec.update import UpdateSpec
from neox_model.deepspeed_compat import (
    allow_any_precision,
    disable_compilation,
    keep_gradients,
)
from neox_model.engine.build_own_update import build_own_update, share_masters
from neox_model.engine.contract import Engine, ForwardEngine
from neox_model.engine.deepspeed_engine import PipelineEngine, PipelineForward, PlainEngine, ZeroUpdate
from neox_model.engine.own_update import OwnUpdate
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups
from neox_model.parallel.mpu import model_parallel_unit

__all__ = ["build", "build_forward", "prepare"]

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


def _build_own(
    run: RunSpec,
    chosen: UpdateSpec,
    model: Any,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    groups: Groups,
) -> tuple[Any, OwnUpdate]:
    """Build the engine for stage 0: our optimizer sums, reduces and applies gradients."""
    is_pipeline = run.layout.is_pipeline
    # Weights may have been initialized on the host; master weights must be on the device.
    model.to(torch.device(get_accelerator().current_device_name()))
    ties = model.take_over_ties() if is_pipeline else ()
    update = build_own_update(run, chosen, model, optimizer, schedule, groups=groups, ties=ties)
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
