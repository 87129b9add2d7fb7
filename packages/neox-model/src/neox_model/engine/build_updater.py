"""Build our update (`updater.py`), which both engines use at ZeRO stage 0."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from neox_config.spec.run import RunSpec
from neox_config.spec.update import LossScaling, UpdateSpec
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.engine.updater import Updater
from neox_model.optim.loss_scale import LossScale
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer, Tie
from neox_model.parallel.gradient_reduction import GradientReduction
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import is_expert

__all__ = ["build_loss_scale", "build_updater", "share_masters"]


def build_updater(
    run: RunSpec,
    chosen: UpdateSpec,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
    ties: Sequence[Tie] = (),
) -> Updater:
    """Build the update of a model whose replicas hold all weights.

    It averages gradients at its start, unless the engine announces the last backward pass
    (`MixedPrecisionOptimizer.begin_last_pass`).

    Args:
        run: how the model runs.
        chosen: how its weights are updated.
        model: float32, on its device; cast here.
        optimizer: over the model's parameters.
        schedule: advanced after each applied update.
        groups: this rank's process groups.
        ties: weights with copies on other pipeline stages, each with the group that sums its gradients.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            # It has no master weights.
            parameter.data = parameter.data.to(DTYPES[run.precision.weights])
    gradients = run.gradients
    reduction = GradientReduction(
        group=groups.data,
        dtype=None if gradients.reduce_in is None else DTYPES[gradients.reduce_in],
        divides_first=gradients.divides_first,
        predivide_factor=gradients.predivide_factor,
    )
    of_experts = replace(reduction, group=groups.copies_of(is_expert=True), divisor=groups.data.size)
    mixed = MixedPrecisionOptimizer(
        optimizer,
        schedule,
        dtype=DTYPES[run.precision.weights],
        accumulation_dtype=DTYPES[gradients.accumulate_in],
        max_norm=chosen.clipping,
        reduce=reduction,
        reduce_experts=of_experts,
        groups=groups,
        loss_scale=build_loss_scale(chosen.scaling, next(model.parameters()).device),
        ties=ties,
    )
    if groups.data.size > 1 and run.reduces_early(on_gpu=computing_device().type != "cpu"):
        mixed.reduce_early(reduction, model.parameters())
    return Updater(mixed, model, groups)


def build_loss_scale(scaling: LossScaling | None, device: torch.device) -> LossScale | None:
    """Return the loss scale, kept on a device; None if the loss is not scaled."""
    return None if scaling is None else LossScale(scaling, device)


def share_masters(update: MixedPrecisionOptimizer, groups: Groups) -> None:
    """Broadcast the master weights of the first replica, so that all replicas start from the same ones."""
    if groups.data.size > 1:
        for master in update.masters:
            copies = groups.copies_of(is_expert=is_expert(master))
            distributed.broadcast(master.data, src=copies.ranks[0], group=copies.process_group)
        update.to_model()
