"""Implement the contract of an engine with torch's own parts, for models without a pipeline."""

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neox_config.spec.run import RunSpec
from neox_config.spec.update import UpdateSpec
from neox_model.assembly.choices import computing_device
from neox_model.engine.base import CountingEngine
from neox_model.engine.build_updater import build_updater, share_masters
from neox_model.engine.contract import Engine, IsStopping, MicroBatch, never
from neox_model.engine.mean_loss import mean_loss, mean_over
from neox_model.engine.updater import Updater
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Group, Groups

if TYPE_CHECKING:
    from neox_model.parallel.sharding import ShardedModel

__all__ = ["TorchEngine", "build"]


class TorchEngine(CountingEngine):
    """An engine around a model that maps (inputs, targets) to the loss.

    Args:
        model: the model.
        update: updates its weights.
        data: data-parallel group over which losses are averaged.
        accumulation: micro-batches per update.
        samples: samples per update, over all data-parallel ranks.
        sharded: the partition of the model; None if every replica holds it whole.
    """

    def __init__(
        self,
        model: nn.Module,
        update: Updater,
        data: Group,
        *,
        accumulation: int,
        samples: int,
        sharded: "ShardedModel | None" = None,
    ) -> None:
        super().__init__(model, update, samples)
        self._data = data
        self._accumulation = accumulation
        self._sharded = sharded

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self.update.mixed.parameters[0].device

    def train_batch(self, micro_batches: Iterator[MicroBatch]) -> Tensor:
        """Run forward and backward for each micro-batch, then the update."""
        self.model.train()
        total = torch.zeros((), device=self.device)
        for number in range(self._accumulation):
            with self._measure("data"):
                inputs, targets = next(micro_batches)
            is_last = number == self._accumulation - 1
            if self._sharded is not None:
                self._sharded.begin(is_last=is_last)
            with self._measure("forward"):
                loss = self.model(inputs, targets)
            if is_last:
                self.update.mixed.begin_last_pass()
            with self._measure("backward_inner"):
                (self.update.guard(loss) / self._accumulation).backward()
            total += loss.detach()
        with self._measure("step"):
            if self._sharded is not None:
                self._sharded.take_gradients()
            self.update.mixed.step()
        self.advance()
        return mean_over(self._data, total / self._accumulation)

    def evaluate(
        self, micro_batches: Iterator[MicroBatch], count: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the tokens of the micro-batches, of which there must be `count`."""
        self.model.eval()
        loss = mean_loss(self.model, micro_batches, self._data, is_stopping)
        if self._sharded is not None:
            self._sharded.release()
        return loss

    def forget_shapes(self) -> None:
        """Do nothing: a plain engine stores no shapes."""


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
        applied = build_updater(run, update, model, optimizer, schedule, groups=groups)
        share_masters(applied.mixed, groups)
    return TorchEngine(
        model,
        applied,
        groups.data,
        accumulation=run.batch.accumulation,
        samples=run.batch.whole,
        sharded=sharded,
    )
