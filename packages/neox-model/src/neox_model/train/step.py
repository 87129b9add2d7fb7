"""The interface of a training step: forward, backward and update for one iteration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from neox_model.engine.contract import IsStopping, never
from neox_model.train.data.batch import Batch

__all__ = ["StepReport", "TrainStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The results of one iteration.

    Scalars stay on the device, so that reporting does not synchronize with it; hooks read many at once.

    Args:
        loss: mean over micro-batches and data-parallel ranks, the same on every rank; None if the batch was
            left out, and nothing was computed.
        grad_norm: global 2-norm of the gradients before clipping; None if it was not computed.
        skipped: True if the update was skipped because a gradient or the loss was not finite, or the loss was
            a spike.
        tokens: tokens of this iteration, over all data-parallel ranks.
        loss_scale: loss scale of this iteration in float16; None in other precisions.
        spike_limit: limit above which the loss is a spike; None if losses are not compared.
        spiked: True if the loss is a spike.
    """

    loss: Tensor | None
    grad_norm: Tensor | float | None
    skipped: Tensor | bool
    tokens: int
    loss_scale: Tensor | float | None = None
    spike_limit: Tensor | None = None
    spiked: Tensor | bool = False


class TrainStep(Protocol):
    """Runs one training iteration, and evaluates without training."""

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches. Collective over all ranks."""

    def evaluate(
        self, batches: Iterator[Batch], num_micro_batches: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the next micro-batches' unmasked tokens, of all ranks. Collective.

        It ends early if `is_stopping` returns True, as `ForwardEngine.evaluate` does.
        """
