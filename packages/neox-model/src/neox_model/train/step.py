"""The contract of a training step: forward, backward and update for one iteration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from neox_model.train.batch import Batch

__all__ = ["StepReport", "TrainStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one iteration did.

    The numbers stay on the device, so that reporting does not make the host wait for it; hooks read many at
    once.

    Args:
        loss: mean over micro-batches and data-parallel ranks, the same on every rank.
        grad_norm: global 2-norm of the gradients before clipping; None when nothing computed it.
        skipped: the update was not applied, because a gradient or the loss was not finite.
        tokens: tokens of this iteration, over all data-parallel ranks.
        loss_scale: the scale of this iteration's loss in float16; None elsewhere.
    """

    loss: Tensor
    grad_norm: Tensor | float | None
    skipped: Tensor | bool
    tokens: int
    loss_scale: Tensor | float | None = None


class TrainStep(Protocol):
    """One iteration of training, and the loss of a batch without training on it."""

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches. Collective over all ranks."""

    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Mean loss of the next micro-batches, over data-parallel ranks too. Collective over all ranks."""
