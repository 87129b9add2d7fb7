"""Mean losses over micro-batches and data-parallel ranks."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, distributed, nn

from neox_model.engine.contract import IsStopping, MicroBatch, never
from neox_model.parallel.groups import Group

__all__ = ["PlainForward", "loss_and_weight", "mean_loss", "mean_over", "mean_over_tokens"]


class PlainForward:
    """Evaluates a plain model that has no engine.

    Args:
        model: maps (inputs, targets) to the loss.
        data: data-parallel group over which losses are averaged.
    """

    def __init__(self, model: nn.Module, data: Group) -> None:
        self._model = model.eval()
        self._data = data

    def evaluate(
        self, micro_batches: Iterator[MicroBatch], count: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the tokens of the micro-batches, of which there must be `count`."""
        return mean_loss(self._model, micro_batches, self._data, is_stopping)


def mean_loss(
    model: Callable[..., Tensor],
    micro_batches: Iterator[MicroBatch],
    data: Group,
    is_stopping: IsStopping = never,
) -> Tensor:
    """Return the mean loss over the micro-batches' tokens, without gradients. Collective over the data group.

    Args:
        model: maps (inputs, targets) to the loss.
        micro_batches: on the model's device.
        data: data-parallel group over which the mean is taken.
        is_stopping: asked after each micro-batch; if it returns True, it is the last one.
    """
    sums: list[Tensor] = []
    with torch.no_grad():
        for inputs, targets in micro_batches:
            sums.append(loss_and_weight(model(inputs, targets), targets))
            if is_stopping():
                break
        return mean_over_tokens(data, sums)


def loss_and_weight(loss: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a micro-batch and the weight of its tokens, whose sum it is; float64 [2]."""
    return torch.stack((loss.double(), targets[1].sum().double()))


def mean_over_tokens(data: Group, sums: Sequence[Tensor]) -> Tensor:
    """Return the mean loss over the tokens of all micro-batches of a group, float64. Collective.

    Args:
        data: data-parallel group over which the mean is taken.
        sums: `loss_and_weight` of each micro-batch of this rank.
    """
    loss, weight = mean_over(data, torch.stack(list(sums)).sum(dim=0))
    return loss / weight


def mean_over(data: Group, loss: Tensor) -> Tensor:
    """Return the mean of the loss over a group. Collective; may change `loss` in place."""
    if data.size > 1:
        distributed.all_reduce(loss, group=data.process_group)
        loss = loss / data.size
    return loss
