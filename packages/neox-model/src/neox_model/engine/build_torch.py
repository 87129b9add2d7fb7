"""Build the engine of torch's own parts from the configuration."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from neox_config import Resolved
from neox_config.derive.engine_json import accumulation_dtype
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.engine.build_own_update import (
    build_loss_scale,
    build_own_update,
    cast_frozen,
    share_masters,
)
from neox_model.engine.contract import Engine
from neox_model.engine.own_update import OwnUpdate
from neox_model.engine.torch_engine import TorchEngine
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.groups import Group, Groups
from neox_model.parallel.sharding import MeanReduceScatter, Precisions, ShardedModel, sum_over

__all__ = ["build", "prepare"]


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
    # Weights may have been initialized on the host.
    model.to(computing_device())
    is_sharded = resolved.config.zero.zero_optimization.stage > 0 and groups.data.size > 1
    sharded = None
    if is_sharded:
        cast_frozen(model, DTYPES[resolved.derived.precision])
        sharded = _shard(resolved, model, groups)
        update = _build_sharded_update(resolved, sharded, optimizer, schedule, groups)
    else:
        update = build_own_update(resolved, model, optimizer, schedule, groups=groups)
        share_masters(update.mixed, groups)
    return TorchEngine(
        model,
        update,
        groups.data,
        accumulation=resolved.derived.accumulation,
        samples=resolved.derived.train_batch_size,
        sharded=sharded,
    )


def _shard(resolved: Resolved, model: nn.Module, groups: Groups) -> ShardedModel:
    """Partition the model over the data group, as its ZeRO stage says."""
    zero, engine, derived = resolved.config.zero.zero_optimization, resolved.config.engine, resolved.derived
    messages = DTYPES[engine.communication_data_type or derived.precision]
    reduces_every_time = zero.stage >= 2 or derived.accumulation == 1
    accumulation = messages if reduces_every_time else DTYPES[accumulation_dtype(resolved)]
    # The last two, norm and head, are gathered with the root.
    blocks: Sequence[nn.Module] = list(getattr(model, "stack", ()))[:-2]
    return ShardedModel(
        model,
        blocks,
        group=groups.data,
        precisions=Precisions(
            computation=DTYPES[derived.precision], accumulation=accumulation, messages=messages
        ),
        reduction=MeanReduceScatter(
            messages,
            size=groups.data.size,
            divides_first=zero.stage == 3 or zero.reduce_scatter or engine.prescale_gradients,
            predivide_factor=engine.gradient_predivide_factor,
        ),
        reshards_after_forward=_resharding(zero.stage, zero.zero_hpz_partition_size),
        partitions_frozen=zero.stage == 3,
        reduces_every_time=reduces_every_time,
    )


def _resharding(stage: int, second_partition: int) -> bool | int:
    """Return what becomes of whole weights after the forward pass (see `ShardedModel`)."""
    if stage < 3:
        return False
    return second_partition if second_partition > 1 else True


def _build_sharded_update(
    resolved: Resolved,
    sharded: ShardedModel,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    groups: Groups,
) -> OwnUpdate:
    """Build the update of this rank's part of the weights, whose gradients arrive averaged."""
    for group in optimizer.param_groups:
        group["params"] = [sharded.holder_of(parameter) for parameter in group["params"]]
    holders = [holder for group in optimizer.param_groups for holder in group["params"]]
    mixed = MixedPrecisionOptimizer(
        optimizer,
        schedule,
        dtype=holders[0].dtype,
        accumulation_dtype=holders[0].dtype,
        max_norm=resolved.config.optimizer.gradient_clipping,
        reduce=partial(_sum_over_model, holders, groups.model),
        groups=groups,
        loss_scale=build_loss_scale(resolved, holders[0].device),
        is_sharded=True,
    )
    return OwnUpdate(mixed, sharded.model, groups, sharded=sharded)


def _sum_over_model(holders: Sequence[Parameter], model: Group, gradients: Sequence[Tensor]) -> None:
    """Sum the gradients of weights that tensor-parallel ranks used for their parts of the sequence."""
    partial_sums = [holder.grad for holder in holders if getattr(holder, "sums_over_model", False)]
    sum_over(model, [gradient for gradient in partial_sums if gradient is not None])
