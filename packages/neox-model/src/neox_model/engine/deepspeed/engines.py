"""Implement the contract of an engine with DeepSpeed's engines and their documented methods."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from neox_model.engine.base import BaseEngine
from neox_model.engine.contract import BeforeUpdate, IsStopping, Measure, MicroBatch, never
from neox_model.engine.deepspeed.compat import (
    counters,
    is_partitioned,
    loss_scale_state,
    measure_instructions,
    measure_reduction,
    never_raise_at_minimum_scale,
    restore_counters,
    restore_loss_scale,
    zero_masters,
    zero_masters_to_model,
    zero_states_in_memory,
)
from neox_model.engine.mean_loss import mean_loss, mean_over
from neox_model.engine.own_update import OwnUpdate
from neox_model.errors import ModelError
from neox_model.optim.mixed_precision import guard_loss
from neox_model.parallel.groups import Group, Groups
from neox_model.parallel.held import Held

__all__ = ["PipelineEngine", "PipelineForward", "PlainEngine", "ZeroUpdate"]


class ZeroUpdate:
    """The update that DeepSpeed makes under ZeRO stages 1 to 3.

    Args:
        inner: DeepSpeed's engine.
        min_loss_scale: lower bound of the loss scale; None if the loss is not scaled.
    """

    splits_over_data = True

    def __init__(self, inner: Any, *, min_loss_scale: float | None) -> None:
        self.min_loss_scale = min_loss_scale
        self._inner = inner
        if min_loss_scale is not None:
            never_raise_at_minimum_scale(inner.optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """Return our optimizer, inside DeepSpeed's."""
        return self._inner.optimizer.optimizer

    @property
    def grad_norm(self) -> Tensor | float | None:
        """Return the norm of the last update's gradients before clipping."""
        return self._inner.get_global_grad_norm()

    @property
    def skipped(self) -> bool:
        """Return True if the last update was skipped."""
        return not self._inner.was_step_applied()

    @property
    def loss_scale(self) -> float | None:
        """Return the loss scale of the next backward pass."""
        return None if self.min_loss_scale is None else float(self._inner.optimizer.loss_scale)

    def guard(self, loss: Tensor) -> Tensor:
        """Return the loss with NaN gradients if it is not finite; DeepSpeed scales it."""
        return guard_loss(loss, None)

    def before(self, call: BeforeUpdate) -> None:
        """Refuse: DeepSpeed reduces, clips and applies gradients in one call.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "gradients cannot be read before the update under DeepSpeed's ZeRO; set engine: torch, or set "
            "zero_optimization.stage: 0"
        )

    def held(self) -> Iterator[Held]:
        """Yield this rank's runs of the master weights."""
        return zero_masters(self._inner.optimizer)

    def in_memory(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Read what is offloaded to NVMe for the block, and write it back if the block may change it."""
        return zero_states_in_memory(self._inner.optimizer, changes=changes)

    def to_model(self) -> None:
        """Copy the master weights into the model's weights. Collective."""
        zero_masters_to_model(self._inner.optimizer)

    def with_shared_weights(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing: all replicas always have the same weights."""
        return nullcontext()

    def measure_reduction(self, measure: Measure) -> None:
        """Measure the reduction after each backward pass; what overlaps with it is not separate."""
        measure_reduction(self._inner, measure)

    def loss_scale_state(self) -> dict[str, Any]:
        """Return the loss scale's state; empty if it does not change."""
        return loss_scale_state(self._inner.optimizer)

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `loss_scale_state`, of this or of another engine."""
        restore_loss_scale(self._inner.optimizer, state)


class _DeepSpeedEngine(BaseEngine):
    """The part that plain and pipeline engines share.

    Args:
        inner: DeepSpeed's engine.
        update: its update.
    """

    update: OwnUpdate | ZeroUpdate

    def __init__(self, inner: Any, update: OwnUpdate | ZeroUpdate) -> None:
        super().__init__(inner.module, update, is_partitioned)
        self._inner = inner

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._inner.device

    def counters(self) -> dict[str, int]:
        """Return DeepSpeed's numbers of updates and samples."""
        return counters(self._inner)

    def restore_counters(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers from `counters`."""
        restore_counters(self._inner, state)


class PlainEngine(_DeepSpeedEngine):
    """An engine around a model that maps (inputs, targets) to the loss.

    Args:
        inner: DeepSpeed's engine.
        update: its update.
        data: data-parallel group over which losses are averaged.
    """

    def __init__(self, inner: Any, update: OwnUpdate | ZeroUpdate, data: Group) -> None:
        super().__init__(inner, update)
        self._data = data

    def train_batch(self, micro_batches: Iterator[MicroBatch]) -> Tensor:
        """Run forward and backward for each micro-batch, then the update."""
        self._inner.train()
        total, count = torch.zeros((), device=self.device), 0
        while True:
            with self._measure("data"):
                micro_batch = next(micro_batches, None)
            if micro_batch is None:
                break
            inputs, targets = micro_batch
            with self._measure("forward"):
                loss = self._inner(inputs, targets)
            with self._measure("backward_inner"):
                self._inner.backward(self.update.guard(loss))
            # DeepSpeed makes the update with the last micro-batch.
            with self._measure("step"):
                self._inner.step()
            total += loss.detach()
            count += 1
        return mean_over(self._data, total / count)

    def evaluate(
        self, micro_batches: Iterator[MicroBatch], count: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the tokens of the micro-batches, of which there must be `count`."""
        self._inner.eval()
        return mean_loss(self._inner, micro_batches, self._data, is_stopping)

    def forget_shapes(self) -> None:
        """Do nothing: a plain engine stores no shapes."""


class PipelineForward:
    """Evaluates through a DeepSpeed pipeline engine.

    Args:
        inner: DeepSpeed's engine.
        groups: this rank's process groups.
    """

    def __init__(self, inner: Any, groups: Groups) -> None:
        self._inner = inner
        self._groups = groups

    def evaluate(
        self, micro_batches: Iterator[MicroBatch], count: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the tokens of `count` micro-batches.

        The first and last stages receive the micro-batches.
        """
        pipe, device = self._groups.pipe, self._inner.device
        weights: list[Tensor] = []
        total, done = torch.zeros((), dtype=torch.float64, device=device), 0
        # As many at a time as in an update, as GPT-NeoX does, so that most stages are busy.
        section = max(pipe.size, self._inner.gradient_accumulation_steps())
        while done < count:
            length = min(section, count - done)
            mean = self._inner.eval_batch(_noted(micro_batches, weights), num_micro_batches=length)
            total += length * mean.detach().squeeze()
            done += length
            if is_stopping():
                break
        # The mean weight of the micro-batches' tokens, which the last stage knows.
        weight = torch.zeros((), device=device)
        if pipe.rank == pipe.size - 1:
            weight += mean_over(self._groups.data, torch.stack(weights).mean())
        if pipe.size > 1:
            distributed.broadcast(weight, pipe.ranks[-1], group=pipe.process_group)
        return total / done / weight


def _noted(micro_batches: Iterator[MicroBatch], weights: list[Tensor]) -> Iterator[MicroBatch]:
    """Yield the micro-batches, and add the weight of the tokens of each to a list."""
    for inputs, targets in micro_batches:
        weights.append(targets[1].sum())
        yield inputs, targets


class PipelineEngine(_DeepSpeedEngine, PipelineForward):
    """An engine around a stage of a pipeline, whose last stage computes the loss inside the engine.

    Args:
        inner: DeepSpeed's engine.
        update: its update.
        groups: this rank's process groups.
    """

    def __init__(self, inner: Any, update: OwnUpdate | ZeroUpdate, groups: Groups) -> None:
        super().__init__(inner, update)
        self._groups = groups
        inner.module.guard_losses(update.guard)

    def measure_phases(self, measure: Measure) -> None:
        """Measure the phases of every step from now on, by the instructions of the pipeline's schedule."""
        super().measure_phases(measure)
        measure_instructions(self._inner, measure)

    def train_batch(self, micro_batches: Iterator[MicroBatch]) -> Tensor:
        """Run all micro-batches through all stages, and the update."""
        return self._inner.train_batch(data_iter=micro_batches).detach()

    def forget_shapes(self) -> None:
        """Let the stages exchange the shapes of their activations again."""
        self._inner.reset_activation_shape()
