"""Build DeepSpeed's engine from the configuration, without compiling operators and without printing."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed, nn
from torch.optim import Optimizer

from neox_config import Resolved, engine_json
from neox_config.derive.engine_json import accumulation_dtype
from neox_config.schema.sections.precision import Amp
from neox_model.assembly.choices import DTYPES
from neox_model.deepspeed_compat import (
    allow_any_precision,
    disable_compilation,
    keep_gradients,
    refuse_other_versions,
)
from neox_model.engine.contract import Engine, ForwardEngine
from neox_model.engine.deepspeed_engine import PipelineEngine, PipelineForward, PlainEngine, ZeroUpdate
from neox_model.engine.mean_loss import PlainForward
from neox_model.engine.own_update import OwnUpdate
from neox_model.optim.loss_scale import LossScale, LossScaleSettings
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.gradient_reduction import GradientReduction
from neox_model.parallel.groups import Groups
from neox_model.parallel.mpu import ModelParallelUnit

__all__ = ["build_engine", "build_forward", "prepare_engine"]

logger = logging.getLogger(__name__)

_APEX_INITIAL_SCALE = 2.0**16
_APEX_WINDOW = 2000


def prepare_engine() -> None:
    """Check DeepSpeed's version, and initialize its communication on torch's process group.

    Call it after `torch.distributed` is initialized and before anything else of this room.

    Raises:
        ModelError: the installed version of DeepSpeed was not tried.
    """
    refuse_other_versions()
    disable_compilation()
    deepspeed.init_distributed(verbose=False)


def build_engine(
    resolved: Resolved,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> Engine:
    """Build DeepSpeed's engine with our optimizer and schedule.

    Under ZeRO stage 0 our optimizer makes the updates in every precision, and DeepSpeed's engine runs in
    float32 mode. DeepSpeed's 16-bit wrappers are used under ZeRO only.

    Args:
        resolved: the configuration.
        model: a plain module or a DeepSpeed PipelineModule; float32, cast here.
        optimizer: over the model's parameters.
        schedule: advanced after each applied update.
        groups: this rank's process groups.
    """
    build = _build_own if resolved.config.zero.zero_optimization.stage == 0 else _build_zero
    inner, update = build(resolved, model, optimizer, schedule, groups)
    if resolved.derived.uses_pipeline:
        return PipelineEngine(inner, update)
    return PlainEngine(inner, update, groups.data)


def build_forward(resolved: Resolved, model: nn.Module, *, groups: Groups) -> ForwardEngine:
    """Build an engine for evaluation only; the model keeps its dtype and device."""
    if not resolved.derived.uses_pipeline:
        return PlainForward(model, groups.data)
    settings = {
        "train_micro_batch_size_per_gpu": resolved.derived.micro_batch_size,
        "gradient_accumulation_steps": 1,
        # Each tensor-parallel rank sends the activations that it holds, copies or parts.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    with _quiet():
        inner, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    return PipelineForward(inner)


def _build_own(
    resolved: Resolved, model: Any, optimizer: Optimizer, schedule: LearningRateSchedule, groups: Groups
) -> tuple[Any, OwnUpdate]:
    """Build the engine for stage 0: our optimizer sums, reduces and applies gradients."""
    is_pipeline = resolved.derived.uses_pipeline
    device = torch.device(get_accelerator().current_device_name())
    # Weights may have been initialized on the host; master weights must be on the device.
    model.to(device)
    _cast_frozen(model, DTYPES[resolved.derived.precision])
    ties = model.take_over_ties() if is_pipeline else ()
    scaling = _loss_scale_settings(resolved)
    update = MixedPrecisionOptimizer(
        optimizer,
        schedule,
        dtype=DTYPES[resolved.derived.precision],
        accumulation_dtype=DTYPES[accumulation_dtype(resolved)],
        max_norm=resolved.config.optimizer.gradient_clipping,
        reduce=_reduction(resolved, groups),
        groups=groups,
        loss_scale=None if scaling is None else LossScale(scaling, device),
        ties=ties,
    )
    # DeepSpeed wraps an optimizer object, but uses the optimizer that a function returns unchanged.
    inner = _initialize(resolved, model, groups, optimizer=lambda parameters: update)
    keep_gradients(inner, is_pipeline=is_pipeline)
    _share_masters(update, groups)
    return inner, OwnUpdate(update, model, groups)


def _cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights that are not trained, which have no master weights."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _share_masters(update: MixedPrecisionOptimizer, groups: Groups) -> None:
    """Broadcast the master weights of the first replica, as DeepSpeed does with the model's weights."""
    if groups.data.size > 1 and update.masters is not update.parameters:
        for master in update.masters:
            distributed.broadcast(master.data, src=groups.data.ranks[0], group=groups.data.process_group)
        update.to_model()


def _build_zero(
    resolved: Resolved, model: Any, optimizer: Optimizer, schedule: LearningRateSchedule, groups: Groups
) -> tuple[Any, ZeroUpdate]:
    """Build the engine for stages 1 to 3, with DeepSpeed's ZeRO optimizers."""
    inner = _initialize(resolved, model, groups, optimizer=optimizer, lr_scheduler=schedule)
    scaling = _loss_scale_settings(resolved)
    if scaling is None:
        return inner, ZeroUpdate(inner, min_loss_scale=None)
    floor = scaling.minimum if scaling.is_dynamic else scaling.initial
    return inner, ZeroUpdate(inner, min_loss_scale=floor)


def _initialize(resolved: Resolved, model: Any, groups: Groups, **parts: Any) -> Any:
    with _quiet(), allow_any_precision():
        inner, *_ = deepspeed.initialize(
            model=model,
            mpu=None if resolved.derived.uses_pipeline else ModelParallelUnit(groups),
            config=engine_json(resolved),
            dist_init_required=False,
            **parts,
        )
    return inner


def _loss_scale_settings(resolved: Resolved) -> LossScaleSettings | None:
    if resolved.derived.autocast == "fp16":
        return _loss_scale_of_amp(resolved.config.precision.amp)
    if resolved.derived.precision != "fp16":
        return None
    fp16 = resolved.config.precision.fp16
    is_dynamic = fp16.loss_scale == 0
    return LossScaleSettings(
        initial=2.0**fp16.initial_scale_power if is_dynamic else fp16.loss_scale,
        is_dynamic=is_dynamic,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _loss_scale_of_amp(amp: Amp) -> LossScaleSettings:
    """Return the loss scale of NVIDIA apex, which halves it at every overflow."""
    is_dynamic, minimum = amp.loss_scale == 0, amp.min_loss_scale or 1.0
    dynamic = max(minimum, min(_APEX_INITIAL_SCALE, amp.max_loss_scale))
    return LossScaleSettings(
        initial=dynamic if is_dynamic else amp.loss_scale,
        is_dynamic=is_dynamic,
        window=_APEX_WINDOW,
        hysteresis=1,
        minimum=minimum,
        maximum=amp.max_loss_scale,
    )


def _reduction(resolved: Resolved, groups: Groups) -> GradientReduction:
    engine = resolved.config.engine
    name = engine.communication_data_type
    return GradientReduction(
        group=groups.data,
        dtype=None if name is None else DTYPES[name],
        divides_first=engine.prescale_gradients,
        predivide_factor=engine.gradient_predivide_factor,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect what DeepSpeed prints while it builds an engine to the debug log."""
    with contextlib.redirect_stdout(_LogLines()):
        yield


class _LogLines(io.TextIOBase):
    """A text stream whose lines are logged."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                logger.debug(line)
        return len(text)
