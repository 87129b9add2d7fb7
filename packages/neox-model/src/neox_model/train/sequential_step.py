"""One iteration of a model that every rank holds whole, but for tensor parallelism and ZeRO."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed

from neox_model.parallel.groups import Group
from neox_model.train.batch import Batch, Weigh, as_they_are
from neox_model.train.engine import Engine
from neox_model.train.step import StepReport

__all__ = ["SequentialStep", "mean_loss"]


class SequentialStep:
    """Forward and backward for each micro-batch, then the engine's update.

    Args:
        engine: the engine around a model that takes (inputs, targets) to the loss.
        accumulation: micro-batches per update.
        tokens: tokens of one update, over all data-parallel ranks.
        data: over whose ranks losses are averaged.
        weigh: how much each token of an update's micro-batches counts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        accumulation: int,
        tokens: int,
        data: Group,
        weigh: Weigh = as_they_are,
    ) -> None:
        self._engine = engine
        self._accumulation = accumulation
        self._tokens = tokens
        self._data = data
        self._weigh = weigh

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        inner = self._engine.inner
        inner.train()
        loss_scale = self._engine.loss_scale
        total = torch.zeros((), device=inner.device)
        for batch in self._weigh(batches, self._accumulation, inner.device):
            loss = inner(batch.inputs, batch.targets)
            inner.backward(self._engine.guard(loss))
            inner.step()
            total += loss.detach()
        return StepReport(
            loss=_mean_over(self._data, total / self._accumulation),
            grad_norm=self._engine.grad_norm,
            skipped=self._engine.skipped_last_update,
            tokens=self._tokens,
            loss_scale=loss_scale,
        )

    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Mean loss of the next micro-batches, over data-parallel ranks too."""
        inner = self._engine.inner
        inner.eval()
        return mean_loss(inner, self._weigh(batches, num_micro_batches, inner.device), self._data)


def mean_loss(model: Callable[..., Tensor], batches: Iterator[Batch], data: Group) -> Tensor:
    """Mean of the micro-batches' losses, without gradients. Collective over the data group.

    Args:
        model: takes (inputs, targets) to the loss.
        batches: on the model's device.
        data: over whose ranks the mean is taken.
    """
    with torch.no_grad():
        losses = [model(batch.inputs, batch.targets) for batch in batches]
        return _mean_over(data, torch.stack(losses).mean())


def _mean_over(data: Group, loss: Tensor) -> Tensor:
    if data.size > 1:
        distributed.all_reduce(loss, group=data.process_group)
        loss = loss / data.size
    return loss
