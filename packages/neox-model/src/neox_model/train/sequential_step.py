"""One iteration of a model that every rank holds whole, but for tensor parallelism and ZeRO."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed

from neox_model.parallel.groups import Group
from neox_model.train.batch import Batch
from neox_model.train.engine import Engine
from neox_model.train.step import StepReport

__all__ = ["SequentialStep", "forward_loss", "mean_loss"]

Loss = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


class SequentialStep:
    """Forward and backward for each micro-batch, then the engine's update.

    Args:
        engine: the engine around the model.
        loss: of (the model's output, (labels, loss mask)).
        accumulation: micro-batches per update.
        tokens: tokens of one update, over all data-parallel ranks.
        data: over whose ranks losses are averaged.
    """

    def __init__(
        self,
        engine: Engine,
        loss: Loss,
        *,
        accumulation: int,
        tokens: int,
        data: Group,
    ) -> None:
        self._engine = engine
        self._loss = loss
        self._accumulation = accumulation
        self._tokens = tokens
        self._data = data

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        inner = self._engine.inner
        inner.train()
        total = torch.zeros((), device=inner.device)
        for _ in range(self._accumulation):
            loss = self._forward(next(batches))
            inner.backward(loss)
            inner.step()
            total += loss.detach()
        return StepReport(
            loss=_mean_over(self._data, total / self._accumulation),
            grad_norm=self._engine.grad_norm,
            skipped=self._engine.skipped_last_update,
            tokens=self._tokens,
        )

    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Mean loss of the next micro-batches, over data-parallel ranks too."""
        self._engine.inner.eval()
        return mean_loss(self._forward, batches, num_micro_batches, self._data)

    def _forward(self, batch: Batch) -> Tensor:
        inner = self._engine.inner
        return forward_loss(inner, self._loss, batch.to(inner.device))


def forward_loss(model: Callable[[Tensor], Tensor], loss: Loss, batch: Batch) -> Tensor:
    """The loss of a batch that lies on the model's device."""
    return loss(model(batch.tokens_BS), (batch.labels_BS, batch.loss_mask_BS))


def mean_loss(
    forward: Callable[[Batch], Tensor], batches: Iterator[Batch], num_micro_batches: int, data: Group
) -> Tensor:
    """Mean of the next micro-batches' losses, without gradients. Collective over the data group."""
    with torch.no_grad():
        losses = [forward(next(batches)) for _ in range(num_micro_batches)]
        return _mean_over(data, torch.stack(losses).mean())


def _mean_over(data: Group, loss: Tensor) -> Tensor:
    if data.size > 1:
        distributed.all_reduce(loss, group=data.process_group)
        loss = loss / data.size
    return loss
