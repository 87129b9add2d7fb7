"""Our update (`optim/mixed_precision.py`) as part of an engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn import Parameter
from torch.optim import Optimizer

from neox_model.engine.contract import BeforeUpdate, Measure, PendingUpdate
from neox_model.engine.mean_loss import mean_over
from neox_model.optim.gradient_norm import (
    global_gradient_norm,
    share_of_zeros,
    shares_of_zeros,
    tensor_gradient_norms,
)
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer, guard_loss
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.param_shard import ParamShard

if TYPE_CHECKING:
    from neox_model.parallel.sharding import ShardedModel

__all__ = ["Updater"]


class Updater:
    """The update of an engine that leaves reduction, clipping and the optimizer to us.

    Args:
        mixed: makes the updates.
        model: the model that is trained; names the gradients.
        groups: this rank's process groups.
        sharded: the partition of the model that the optimizer updates; None: it updates whole parameters.
    """

    def __init__(
        self,
        mixed: MixedPrecisionOptimizer,
        model: nn.Module,
        groups: Groups,
        *,
        sharded: "ShardedModel | None" = None,
    ) -> None:
        self.mixed = mixed
        self.splits_over_data = mixed.is_sharded
        self._sharded = sharded
        self.min_loss_scale = None if mixed.loss_scale is None else mixed.loss_scale.floor
        self._model = model
        self._groups = groups
        # Losses of the micro-batches since the last update, and those of the update that is about to be made.
        self._losses: list[Tensor] = []
        self._batch_losses: list[Tensor] = []

    @property
    def optimizer(self) -> Optimizer:
        """Return the optimizer of the master weights."""
        return self.mixed.optimizer

    @property
    def grad_norm(self) -> Tensor | None:
        """Return the norm of the last update's gradients before clipping."""
        return self.mixed.norm

    @property
    def skipped(self) -> Tensor | bool:
        """Return True if the last update was skipped."""
        return False if self.mixed.found_inf is None else self.mixed.found_inf > 0

    @property
    def loss_scale(self) -> Tensor | None:
        """Return the loss scale of the next backward pass."""
        return None if self.mixed.loss_scale is None else self.mixed.loss_scale.value

    def guard(self, loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, prepared for the backward pass (see `guard_loss`)."""
        # A pipeline's evaluations call this too.
        if self.mixed.before_update and torch.is_grad_enabled():
            self._losses.append(loss.detach())
        return guard_loss(loss, self.loss_scale)

    def names(self) -> dict[int, str]:
        """Return the logical name of each parameter that the update changes, by its id."""
        paths = {id(parameter): name for name, parameter in named_logical_parameters(self._model)}
        held = zip(self.mixed.parameters, self._all_held(), strict=True)
        return {id(parameter): paths[id(run.param)] for parameter, run in held}

    def before(self, call: BeforeUpdate) -> None:
        """Call the function before every update from now on."""
        names = self.names()
        held_as = {names[id(parameter)]: parameter for parameter in self.mixed.parameters}
        if not self.mixed.before_update:
            self.mixed.before_update.append(self._take_losses)

        def call_with_norms(
            parameters: Sequence[Parameter], gradients: Sequence[Tensor], scaled_norm: Tensor
        ) -> None:
            scale, are_averaged = self.loss_scale, not self.mixed.averages_itself
            are_sharded = self.mixed.is_sharded
            call(
                PendingUpdate(
                    norm=scaled_norm if scale is None else scaled_norm / scale,
                    tensor_norms=partial(
                        tensor_gradient_norms,
                        names,
                        parameters,
                        gradients,
                        self._groups,
                        scale=scale,
                        are_averaged=are_averaged,
                        are_sharded=are_sharded,
                    ),
                    weights=lambda: (
                        (names[id(parameter)], parameter.detach(), one if scale is None else one / scale)
                        for parameter, one in zip(parameters, gradients, strict=True)
                    ),
                    norm_of=lambda values: global_gradient_norm(
                        [held_as[name] for name in values],
                        list(values.values()),
                        self._groups,
                        are_sharded=are_sharded,
                    ),
                    tensor_zeros=partial(
                        shares_of_zeros,
                        names,
                        parameters,
                        gradients,
                        self._groups,
                        are_averaged=are_averaged,
                        are_sharded=are_sharded,
                    ),
                    zeros=partial(
                        share_of_zeros,
                        parameters,
                        gradients,
                        self._groups,
                        are_averaged=are_averaged,
                        are_sharded=are_sharded,
                    ),
                    loss=self._mean_loss,
                    leave_out=self.mixed.leave_out,
                )
            )

        self.mixed.before_update.append(call_with_norms)

    def _take_losses(self, *_: object) -> None:
        self._batch_losses, self._losses = self._losses, []

    def _mean_loss(self) -> Tensor:
        """Return the mean loss of the batch, the same on every rank. Collective over all ranks."""
        if self._batch_losses:
            loss = mean_over(self._groups.data, torch.stack(self._batch_losses).mean())
        else:
            # Only the last stage of a pipeline computes the loss.
            loss = torch.full((), -torch.inf, device=self.mixed.parameters[0].device)
        for group in (self._groups.model, self._groups.pipe):
            loss = all_reduce(loss, group, ReduceOp.MAX)
        return loss

    def param_shards(self) -> Iterator[ParamShard]:
        """Yield every parameter, or this rank's part of it, with its master weight."""
        return (held for held in self._all_held() if held.numel > 0)

    def _all_held(self) -> Iterator[ParamShard]:
        """Yield what the optimizer updates, in its order, and also what is empty on this rank."""
        if self._sharded is not None:
            yield from self._sharded.param_shards_of(self.mixed.parameters)
            return
        for param, master in zip(self.mixed.parameters, self.mixed.masters, strict=True):
            yield ParamShard(param, 0, param.numel(), master, 0, tuple(param.shape))

    def in_memory(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Do nothing: they always are."""
        return nullcontext()

    def to_model(self) -> None:
        """Copy the master weights, which were loaded, into the model's weights."""
        self.mixed.to_model()
        if self._sharded is not None:
            self._sharded.release()

    def with_shared_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the weights that all replicas have."""
        return self.mixed.with_shared_weights()

    def measure_reduction(self, measure: Measure) -> None:
        """Measure the reduction over data-parallel ranks, which is a part of the step, from now on."""
        self.mixed.measure_reduction(measure)

    def loss_scale_state(self) -> dict[str, Any]:
        """Return the loss scale's state; empty if it does not change."""
        scale = self.mixed.loss_scale
        return scale.state_dict() if scale is not None and scale.settings.is_dynamic else {}

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `loss_scale_state`, of this or of another engine."""
        if self.mixed.loss_scale is not None:
            self.mixed.loss_scale.load_state_dict(state)
