"""Mean losses over micro-batches and data-parallel ranks, without a pipeline."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed, nn

from neox_model.engine.contract import MicroBatch
from neox_model.parallel.groups import Group

__all__ = ["PlainForward", "mean_loss", "mean_over"]


class PlainForward:
    """Evaluates a plain model that has no engine.

    Args:
        model: maps (inputs, targets) to the loss.
        data: data-parallel group over which losses are averaged.
    """

    def __init__(self, model: nn.Module, data: Group) -> None:
        self._model = model.eval()
        self._data = data

    def evaluate(self, micro_batches: Iterator[MicroBatch], count: int) -> Tensor:
        """Return the mean loss of the micro-batches, of which there must be `count`."""
        return mean_loss(self._model, micro_batches, self._data)


def mean_loss(model: Callable[..., Tensor], micro_batches: Iterator[MicroBatch], data: Group) -> Tensor:
    """Return the mean of the micro-batches' losses, without gradients. Collective over the data group.

    Args:
        model: maps (inputs, targets) to the loss.
        micro_batches: on the model's device.
        data: data-parallel group over which the mean is taken.
    """
    with torch.no_grad():
        losses = [model(inputs, targets) for inputs, targets in micro_batches]
        return mean_over(data, torch.stack(losses).mean())


def mean_over(data: Group, loss: Tensor) -> Tensor:
    """Return the mean of the loss over a group. Collective; may change `loss` in place."""
    if data.size > 1:
        distributed.all_reduce(loss, group=data.process_group)
        loss = loss / data.size
    return loss
