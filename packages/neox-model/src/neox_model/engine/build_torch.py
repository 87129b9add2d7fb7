"""Build the engine of torch's own parts from the configuration."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from neox_config import Resolved
from neox_model.assembly.choices import computing_device
from neox_model.assembly.zero_sharding import (
    is_partitioned_by_torch,
    message_dtype,
    partition_model,
    reduces_every_time,
)
from neox_model.engine.build_own_update import build_loss_scale, build_own_update, share_masters
from neox_model.engine.contract import Engine
from neox_model.engine.own_update import OwnUpdate
from neox_model.engine.torch_engine import TorchEngine
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.groups import Groups
from neox_model.parallel.sharding import MeanReduceScatter, ShardedModel

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
    sharded = None
    if is_partitioned_by_torch(resolved, groups):
        sharded, update = _build_sharded(resolved, model, optimizer, schedule, groups)
    else:
        # Weights may have been initialized on the host.
        model.to(computing_device())
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


def _build_sharded(
    resolved: Resolved,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    groups: Groups,
) -> tuple[ShardedModel, OwnUpdate]:
    """Build the update of this rank's part of the weights, whose gradients arrive averaged."""
    zero, engine = resolved.config.zero.zero_optimization, resolved.config.engine
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    if not isinstance(model, FSDPModule):
        model.to(computing_device())
        partition_model(resolved, model, groups)
    sharded = ShardedModel(
        model,
        group=groups.data,
        reduction=MeanReduceScatter(
            message_dtype(resolved),
            size=groups.data.size,
            divides_first=zero.stage == 3 or zero.reduce_scatter or engine.prescale_gradients,
            predivide_factor=engine.gradient_predivide_factor,
        ),
        keeps_weights=zero.stage < 3,
        reduces_every_time=reduces_every_time(resolved),
    )
    partitioned = dict(model.named_parameters())
    for group in optimizer.param_groups:
        parameters = [partitioned[paths[id(parameter)]] for parameter in group["params"]]
        group["params"] = [sharded.holder_of(parameter) for parameter in parameters]
    holders = [holder for group in optimizer.param_groups for holder in group["params"]]
    mixed = MixedPrecisionOptimizer(
        optimizer,
        schedule,
        dtype=holders[0].dtype,
        accumulation_dtype=holders[0].dtype,
        max_norm=resolved.config.optimizer.gradient_clipping,
        reduce=_already_averaged,
        groups=groups,
        loss_scale=build_loss_scale(resolved, holders[0].device),
        is_sharded=True,
    )
    return sharded, OwnUpdate(mixed, model, groups, sharded=sharded)


def _already_averaged(gradients: Sequence[Tensor]) -> None:
    """Do nothing: the gradients of parts are averaged as they arrive."""
