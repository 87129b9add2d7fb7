"""Build the engine of torch's pipeline schedules from the configuration."""

from torch import nn
from torch.optim import Optimizer

from neox_config import Resolved
from neox_model.assembly.as_stages import StagedModel
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.assembly.zero_sharding import is_partitioned_by_torch
from neox_model.engine.build_own_update import build_own_update, share_masters
from neox_model.engine.build_sharded import build_sharded_stage
from neox_model.engine.contract import Engine, ForwardEngine
from neox_model.engine.torch_pipeline import TorchPipelineEngine, TorchPipelineForward
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups

__all__ = ["build", "build_forward", "prepare"]


def prepare() -> None:
    """Do nothing: torch.distributed is all that it requires."""


def build(
    resolved: Resolved,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> Engine:
    """Build the engine with our optimizer and schedule (see `build_engine`)."""
    assert isinstance(model, StagedModel)
    sharded = None
    if is_partitioned_by_torch(resolved, groups):
        sharded, update = build_sharded_stage(resolved, model, optimizer, schedule, groups=groups)
    else:
        # Weights may have been initialized on the host.
        model.to(computing_device())
        ties = model.take_over_ties()
        update = build_own_update(resolved, model, optimizer, schedule, groups=groups, ties=ties)
        share_masters(update.mixed, groups)
    return TorchPipelineEngine(
        model,
        update,
        groups,
        schedule=resolved.config.parallelism.pipeline_schedule,
        accumulation=resolved.derived.accumulation,
        samples=resolved.derived.train_batch_size,
        dtype=DTYPES[resolved.derived.precision],
        sharded=sharded,
    )


def build_forward(resolved: Resolved, model: nn.Module, *, groups: Groups) -> ForwardEngine:
    """Build a pipeline engine for evaluation only; the model keeps its dtype and device."""
    assert isinstance(model, StagedModel)
    return TorchPipelineForward(model, groups, dtype=next(model.parameters()).dtype)
