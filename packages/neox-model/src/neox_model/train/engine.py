"""DeepSpeed's engine around the model: started without compiling anything, and quiet.

DeepSpeed compiles an operator when something first asks for it. A training that is killed meanwhile leaves
a lock file that blocks every later start, so here nothing may be compiled: what is not installed is refused
by name.
"""

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import compiler
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from neox_launcher.config import Resolved, engine_json
from neox_launcher.config.engine_json import accumulation_dtype
from neox_launcher.errors import NeoXError
from neox_model.build.choices import DTYPES
from neox_model.optim.loss_scale import LossScale, LossScaleSettings
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer, guard_loss
from neox_model.parallel.gradient_reduction import GradientReduction
from neox_model.parallel.groups import Groups
from neox_model.parallel.mpu import ModelParallelUnit

__all__ = ["Engine", "build_engine", "build_pipeline_forward", "prepare_deepspeed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A DeepSpeed engine and what is known about its last update.

    Args:
        inner: DeepSpeed's engine, plain or pipeline.
        optimizer: what makes the updates under ZeRO stage 0; None where DeepSpeed's ZeRO does, and for an
            engine that cannot train.
        min_loss_scale: the value below which the loss scale cannot fall.
    """

    inner: Any
    optimizer: MixedPrecisionOptimizer | None = None
    min_loss_scale: float | None = None

    @property
    def grad_norm(self) -> Tensor | float | None:
        """Global 2-norm of the last update's gradients before clipping; None before the first update."""
        return self.inner.get_global_grad_norm() if self.optimizer is None else self.optimizer.norm

    @property
    def skipped_last_update(self) -> Tensor | bool:
        """Whether the last update was not applied because a gradient or the loss was not finite."""
        if self.optimizer is None:
            return not self.inner.was_step_applied()
        return False if self.optimizer.found_inf is None else self.optimizer.found_inf > 0

    @property
    def loss_scale(self) -> Tensor | float | None:
        """The scale of the next backward pass; None where the loss is not scaled."""
        if self.min_loss_scale is None:
            return None
        scale = self.inner.optimizer.loss_scale
        return scale.value if isinstance(scale, LossScale) else float(scale)

    def guard(self, loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, prepared for the backward pass (see `guard_loss`)."""
        # DeepSpeed's ZeRO scales the loss itself.
        own = None if self.optimizer is None else self.optimizer.loss_scale
        return guard_loss(loss, None if own is None else own.value)


def prepare_deepspeed() -> None:
    """Keep DeepSpeed from compiling operators, and let it join the process group that torch has started.

    To be called after `torch.distributed` is initialized and before anything else of DeepSpeed.
    """
    # Asking which operators could be compiled starts compilers, and the CPU backend compiles one that
    # "could be".
    deepspeed.ops.__compatible_ops__ = {}
    OpBuilder.jit_load = _refuse_to_compile
    # It calls functions of torch.distributed under names that have become old, and broadcasts activations
    # that have gradients, which it then sends back itself.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    warnings.filterwarnings("ignore", message="c10d::broadcast_", category=UserWarning)
    _import_muon_uncompiled()
    deepspeed.init_distributed(verbose=False)


def _import_muon_uncompiled() -> None:
    """ZeRO imports DeepSpeed's Muon optimizer during the first update, to ask whether it is the one in use.

    It never is, and wrapping its functions for torch.compile as they are imported takes seconds.
    """
    wrap = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = wrap


def build_engine(
    resolved: Resolved,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> Engine:
    """Build DeepSpeed's engine with our optimizer and schedule.

    Under ZeRO stage 0 the update is ours in every precision, and DeepSpeed's engine takes the model for a
    float32 one; its own 16-bit wrappers are used by ZeRO alone.

    Args:
        resolved: the configuration.
        model: a plain module or a DeepSpeed PipelineModule; float32, cast here.
        optimizer: over the model's parameters.
        schedule: advanced after each update that was applied.
        groups: this rank's groups.
    """
    build = _build_plain if resolved.config.zero.zero_optimization.stage == 0 else _build_zero
    engine = build(resolved, model, optimizer, schedule, groups)
    if resolved.derived.uses_pipeline:
        _guard_losses_of(engine)
    return engine


def _build_plain(
    resolved: Resolved, model: Any, optimizer: Optimizer, schedule: LearningRateSchedule, groups: Groups
) -> Engine:
    """Stage 0: gradients are summed, reduced and applied by our own optimizer."""
    is_pipeline = resolved.derived.uses_pipeline
    device = torch.device(get_accelerator().current_device_name())
    # Weights may have been initialized on the host; masters are made where they will be updated.
    model.to(device)
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
    # DeepSpeed wraps what it knows to be an optimizer; what a function returns it takes as it is.
    inner = _initialize(resolved, model, groups, optimizer=lambda parameters: update)
    reduction = "pipeline_enable_backward_allreduce" if is_pipeline else "enable_backward_allreduce"
    setattr(inner, reduction, False)
    _share_masters(update, groups)
    scale = update.loss_scale
    return Engine(inner, update, min_loss_scale=None if scale is None else scale.floor)


def _share_masters(update: MixedPrecisionOptimizer, groups: Groups) -> None:
    """Start all replicas from the first one's masters, as DeepSpeed does with the model's own weights."""
    if groups.data.size > 1 and update.masters is not update.parameters:
        for master in update.masters:
            distributed.broadcast(master.data, src=groups.data.ranks[0], group=groups.data.process_group)
        update.to_model()


def _build_zero(
    resolved: Resolved, model: Any, optimizer: Optimizer, schedule: LearningRateSchedule, groups: Groups
) -> Engine:
    """Stages 1 to 3: everything is DeepSpeed's."""
    inner = _initialize(resolved, model, groups, optimizer=optimizer, lr_scheduler=schedule)
    scaling = _loss_scale_settings(resolved)
    if scaling is None:
        return Engine(inner)
    # It would end the run by a bare exception at the first overflow at the minimum; the guard ends it
    # (train/hooks).
    inner.optimizer.loss_scaler.raise_error_at_min_scale = False
    return Engine(inner, min_loss_scale=scaling.minimum if scaling.is_dynamic else scaling.initial)


def _initialize(resolved: Resolved, model: Any, groups: Groups, **parts: Any) -> Any:
    with _quiet(), _any_precision():
        inner, *_ = deepspeed.initialize(
            model=model,
            mpu=None if resolved.derived.uses_pipeline else ModelParallelUnit(groups),
            config=engine_json(resolved),
            dist_init_required=False,
            **parts,
        )
    return inner


def _loss_scale_settings(resolved: Resolved) -> LossScaleSettings | None:
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


def _reduction(resolved: Resolved, groups: Groups) -> GradientReduction:
    engine = resolved.config.engine
    name = engine.communication_data_type
    return GradientReduction(
        group=groups.data,
        dtype=None if name is None else DTYPES[name],
        divides_first=engine.prescale_gradients,
        predivide_factor=engine.gradient_predivide_factor,
    )


def _guard_losses_of(engine: Engine) -> None:
    """A pipeline computes its loss inside the engine, on the last stage: prepare it there."""
    model = engine.inner.module
    loss_of: Callable[..., Tensor] = model.loss_fn
    model.loss_fn = lambda hidden_SBD, targets: engine.guard(loss_of(hidden_SBD, targets))


@contextlib.contextmanager
def _any_precision() -> Iterator[None]:
    """Let DeepSpeed train in float16 without float16 instructions: slower, with the same result."""
    kind = type(get_accelerator())
    supported = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    try:
        yield
    finally:
        kind.is_fp16_supported = supported


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What DeepSpeed prints while it builds a model or an engine becomes debug lines of the log."""
    with contextlib.redirect_stdout(_LogLines()):
        yield


class _LogLines(io.TextIOBase):
    """A text stream whose lines are logged."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                logger.debug(line)
        return len(text)


def build_pipeline_forward(model: nn.Module, *, micro_batch_size: int) -> Engine:
    """A pipeline engine that evaluates and cannot train; the model keeps its dtype."""
    settings = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        # Whether tensor-parallel ranks hold copies of what is sent or shares of it: each sends what it has.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    with _quiet():
        inner, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    return Engine(inner)


def _refuse_to_compile(builder: OpBuilder, verbose: bool = True) -> None:
    raise NeoXError(
        f"DeepSpeed's operator {builder.name} is not installed, and nothing is compiled while a training "
        f"starts; install DeepSpeed with DS_BUILD_{builder.name.upper()}=1, "
        "or leave out the setting that needs it"
    )
