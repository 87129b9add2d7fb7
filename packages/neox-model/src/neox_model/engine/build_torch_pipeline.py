"""Build the engine of torch's pipeline schedules from the configuration."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from neox_config.spec.run import Batch, Layout, RunSpec
from neox_config.spec.update import UpdateSpec
from neox_model.assembly.as_sequential import LayerPlan
from neox_model.assembly.as_stages import StagedModel, as_stages
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.engine.build_own_update import build_own_update, share_masters
from neox_model.engine.build_sharded import build_sharded_stage
from neox_model.engine.contract import Engine, ForwardEngine
from neox_model.engine.torch_pipeline import TorchPipelineEngine, TorchPipelineForward
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups

__all__ = ["build", "build_forward", "build_stages"]


def build(
    run: RunSpec,
    update: UpdateSpec,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> Engine:
    """Build the engine with our optimizer and schedule (see `build_engine`)."""
    assert isinstance(model, StagedModel)
    sharded = None
    if run.partitions_rows and groups.data.size > 1:
        sharded, applied = build_sharded_stage(run, update, model, optimizer, schedule, groups=groups)
    else:
        # Weights may have been initialized on the host.
        model.to(computing_device())
        ties = model.take_over_ties()
        applied = build_own_update(run, update, model, optimizer, schedule, groups=groups, ties=ties)
        share_masters(applied.mixed, groups)
    return TorchPipelineEngine(
        model,
        applied,
        groups,
        schedule=run.layout.schedule,
        accumulation=run.batch.accumulation,
        samples=run.batch.whole,
        dtype=DTYPES[run.precision.weights],
        sharded=sharded,
    )


def build_forward(batch: Batch, model: nn.Module, *, groups: Groups) -> ForwardEngine:
    """Build a pipeline engine for evaluation only; the model keeps its dtype and device."""
    assert isinstance(model, StagedModel)
    return TorchPipelineForward(model, groups, dtype=next(model.parameters()).dtype)


def build_stages(plan: Sequence[LayerPlan], groups: Groups, layout: Layout, **parts: Any) -> StagedModel:
    """Build this rank's chunks of a pipeline (see `as_stages`)."""
    return as_stages(
        plan,
        groups,
        chunks=layout.chunks,
        placement=layout.placement,
        partition_method=layout.partition,
        **parts,
    )
