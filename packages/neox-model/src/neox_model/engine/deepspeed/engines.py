"""Implement the contract of an engine with DeepSpeed's engines and their documented methods."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from neox_model.engine.base import BaseEngine
from neox_model.engine.contract import IsStopping, Measure, MicroBatch, never
from neox_model.engine.deepspeed.compat import (
    is_partitioned,
    measure_instructions,
)
from neox_model.engine.deepspeed.zero import ZeroUpdate
from neox_model.engine.mean_loss import mean_loss, mean_over
from neox_model.engine.updater import Updater
from neox_model.parallel.groups import Group, Groups

__all__ = ["PipelineEngine", "PipelineForward", "PlainEngine"]


_COUNTERS = ("global_steps", "global_samples")


class _DeepSpeedEngine(BaseEngine):
    """The part that plain and pipeline engines share.

    Args:
        inner: DeepSpeed's engine.
        update: its update.
    """

    update: Updater | ZeroUpdate

    def __init__(self, inner: Any, update: Updater | ZeroUpdate) -> None:
        super().__init__(inner.module, update, is_partitioned)
        self._inner = inner

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._inner.device

    def counters(self) -> dict[str, int]:
        """Return DeepSpeed's numbers of updates and samples."""
        return {name: int(getattr(self._inner, name)) for name in _COUNTERS}

    def restore_counters(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers from `counters`."""
        for name in _COUNTERS:
            setattr(self._inner, name, state[name])


class PlainEngine(_DeepSpeedEngine):
    """An engine around a model that maps (inputs, targets) to the loss.

    Args:
        inner: DeepSpeed's engine.
        update: its update.
        data: data-parallel group over which losses are averaged.
    """

    def __init__(self, inner: Any, update: Updater | ZeroUpdate, data: Group) -> None:
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

    def __init__(self, inner: Any, update: Updater | ZeroUpdate, groups: Groups) -> None:
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
