"""Build the engine of torch's own parts from the configuration."""

import importlib

from torch import nn
from torch.optim import Optimizer

from neox_config.spec.run import RunSpec
from neox_config.spec.update import UpdateSpec
from neox_model.assembly.choices import computing_device
from neox_model.engine.build_own_update import build_own_update, share_masters
from neox_model.engine.contract import Engine
from neox_model.engine.torch_engine import TorchEngine
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups

__all__ = ["build"]


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
    sharded = None
    if run.partitions_rows and groups.data.size > 1:
        # Imported by name: torch's `fully_shard` takes a second to import.
        build_sharded = importlib.import_module("neox_model.engine.build_sharded").build_sharded_model
        sharded, applied = build_sharded(run, update, model, optimizer, schedule, groups=groups)
    else:
        # Weights may have been initialized on the host.
        model.to(computing_device())
        applied = build_own_update(run, update, model, optimizer, schedule, groups=groups)
        share_masters(applied.mixed, groups)
    return TorchEngine(
        model,
        applied,
        groups.data,
        accumulation=run.batch.accumulation,
        samples=run.batch.whole,
        sharded=sharded,
    )
