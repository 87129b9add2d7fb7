"""Build our update of parameters that torch's `fully_shard` partitions (ZeRO stages 1 to 3)."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from neox_config.spec.run import RunSpec
from neox_config.spec.update import UpdateSpec
from neox_model.assembly.as_stages import StagedModel
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.assembly.zero_sharding import partition_model
from neox_model.engine.build_updater import build_loss_scale
from neox_model.engine.updater import Updater
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.groups import Groups
from neox_model.parallel.sharded_stage import ShardedStage
from neox_model.parallel.sharding import MeanReduceScatter, ShardedModel

__all__ = ["build_sharded_model", "build_sharded_stage"]


def build_sharded_model(
    run: RunSpec,
    update: UpdateSpec,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> tuple[ShardedModel, Updater]:
    """Build the partition of a model and the update of this rank's part of the weights. Collective.

    Args:
        run: how the model runs.
        update: how its weights are updated.
        model: partitioned already, or float32 with all weights.
        optimizer: over the model's parameters; updates this rank's part of them from now on.
        schedule: advanced after each applied update.
        groups: this rank's process groups.
    """
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    if not isinstance(model, FSDPModule):
        model.to(computing_device())
        partition_model(run, model, groups)
    sharded = ShardedModel(model, **_settings(run, groups))
    return sharded, _build_update(update, sharded, optimizer, schedule, groups, paths=paths)


def build_sharded_stage(
    run: RunSpec,
    update: UpdateSpec,
    model: StagedModel,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> tuple[ShardedStage, Updater]:
    """Build the partition of a stage and the update of this rank's part (see `build_sharded_model`)."""
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    sharded = ShardedStage(model, list(model.own_chunks()), **_settings(run, groups))
    ties = model.take_over_ties()
    return sharded, _build_update(update, sharded, optimizer, schedule, groups, paths=paths, ties=ties)


def _settings(run: RunSpec, groups: Groups) -> dict[str, Any]:
    gradients, zero = run.gradients, run.layout.zero
    return {
        "groups": groups,
        "reduction": lambda size: MeanReduceScatter(
            DTYPES[run.reduces_in],
            size=size,
            divides_first=zero == 3 or gradients.reduce_scatter or gradients.divides_first,
            predivide_factor=gradients.predivide_factor,
        ),
        "keeps_weights": zero < 3,
        "reduces_every_time": gradients.reduces_each,
    }


def _build_update(
    update: UpdateSpec,
    sharded: ShardedModel,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    groups: Groups,
    *,
    paths: dict[int, str],
    ties: Sequence[tuple[nn.Parameter, ProcessGroup]] = (),
) -> Updater:
    """Build the update, whose gradients arrive averaged.

    Args:
        update: how weights are updated.
        sharded: the partition.
        optimizer: over the parameters before they were partitioned.
        schedule: advanced after each applied update.
        groups: this rank's process groups.
        paths: path of each of these parameters, by its id.
        ties: partitioned weights with copies on other stages, each with the group that sums its gradients.
    """
    partitioned = dict(sharded.model.named_parameters())
    for group in optimizer.param_groups:
        parameters = [partitioned[paths[id(parameter)]] for parameter in group["params"]]
        group["params"] = [sharded.holder_of(parameter) for parameter in parameters]
    holders = [holder for group in optimizer.param_groups for holder in group["params"]]
    mixed = MixedPrecisionOptimizer(
        optimizer,
        schedule,
        dtype=holders[0].dtype,
        accumulation_dtype=holders[0].dtype,
        max_norm=update.clipping,
        # The gradients of parts are averaged as they arrive.
        reduce=lambda gradients: None,
        groups=groups,
        loss_scale=build_loss_scale(update.scaling, holders[0].device),
        ties=[(sharded.holder_of(parameter), group) for parameter, group in ties],
        is_sharded=True,
    )
    return Updater(mixed, sharded.model, groups, sharded=sharded)
