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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import compiler
from torch import Tensor, nn
from torch.optim import Optimizer

from neox_launcher.errors import NeoXError
from neox_model.optim.clipping import GradientClipper
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups
from neox_model.parallel.mpu import ModelParallelUnit

__all__ = ["Engine", "build_engine", "build_pipeline_forward", "prepare_deepspeed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A DeepSpeed engine and what is known about its last update.

    Args:
        inner: DeepSpeed's engine, plain or pipeline.
        clipper: where DeepSpeed would not tell the gradient norm, the one who computes it.
    """

    inner: Any
    clipper: GradientClipper | None

    @property
    def grad_norm(self) -> Tensor | float | None:
        """Global 2-norm of the last update's gradients before clipping; None before the first update."""
        return self.inner.get_global_grad_norm() if self.clipper is None else self.clipper.norm

    @property
    def skipped_last_update(self) -> bool:
        """Whether the last update was not applied, because a 16-bit gradient overflowed."""
        return not self.inner.was_step_applied()


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
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    settings: dict[str, Any],
    groups: Groups,
    is_pipeline: bool,
) -> Engine:
    """DeepSpeed's engine with our optimizer and schedule.

    Args:
        model: a plain module or a DeepSpeed PipelineModule.
        optimizer: over the model's parameters.
        schedule: stepped by the engine after each update that was applied.
        settings: the dict that `deepspeed.initialize` takes; not changed.
        groups: this rank's groups.
        is_pipeline: the model is a PipelineModule, which brings groups of its own.

    Raises:
        NeoXError: the precision is one that this device does not have.
    """
    if settings.get("fp16", {}).get("enabled", False) and not get_accelerator().is_fp16_supported():
        raise NeoXError("precision fp16 needs a GPU, and none was found; use bfloat16 or fp32")
    clipper = None
    if _leaves_clipping_to_us(settings):
        clipper = GradientClipper(optimizer, max_norm=settings.get("gradient_clipping", 0.0), groups=groups)
        settings = settings | {"gradient_clipping": 0.0}
    with _quiet():
        inner, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            mpu=None if is_pipeline else ModelParallelUnit(groups),
            config=settings,
            dist_init_required=False,
        )
    if groups.data.size == 1 and not _reduces_in_the_optimizer(settings):
        # One replica has nobody to sum gradients with; DeepSpeed would still copy all of them there and back.
        reduction = "pipeline_enable_backward_allreduce" if is_pipeline else "enable_backward_allreduce"
        setattr(inner, reduction, False)
    return Engine(inner, clipper)


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
    return Engine(inner, None)


def _leaves_clipping_to_us(settings: dict[str, Any]) -> bool:
    """32-bit weights under ZeRO stage 0: DeepSpeed does not wrap the optimizer and keeps no gradient norm."""
    sixteen_bit = any(settings.get(kind, {}).get("enabled", False) for kind in ("fp16", "bf16"))
    return not sixteen_bit and settings.get("zero_optimization", {}).get("stage", 0) == 0


def _reduces_in_the_optimizer(settings: dict[str, Any]) -> bool:
    """ZeRO's optimizers take gradients from what is reduced, and float16's looks for overflows there."""
    is_sharded = settings.get("zero_optimization", {}).get("stage", 0) > 0
    return is_sharded or bool(settings.get("fp16", {}).get("enabled", False))


def _refuse_to_compile(builder: OpBuilder, verbose: bool = True) -> None:
    raise NeoXError(
        f"DeepSpeed's operator {builder.name} is not installed, and nothing is compiled while a training "
        f"starts; install DeepSpeed with DS_BUILD_{builder.name.upper()}=1, "
        "or leave out the setting that needs it"
    )
