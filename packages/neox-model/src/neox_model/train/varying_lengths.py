"""A training step for sequence lengths that change between iterations."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from neox_model.engine.contract import IsStopping, never
from neox_model.train.data.batch import Batch
from neox_model.train.step import StepReport, TrainStep

__all__ = ["VaryingLengths"]


class VaryingLengths:
    """Wraps a step: resets cached shapes before each call, and reports the actual number of tokens.

    Args:
        step: the wrapped step.
        tokens: returns the tokens of the current iteration, over all data-parallel ranks.
        forget_shapes: called before the step; pipeline stages then exchange the shapes of their activations
            again.
    """

    def __init__(
        self, step: TrainStep, *, tokens: Callable[[], int], forget_shapes: Callable[[], None]
    ) -> None:
        self._step = step
        self._tokens = tokens
        self._forget_shapes = forget_shapes

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        self._forget_shapes()
        return replace(self._step(batches), tokens=self._tokens())

    def evaluate(
        self, batches: Iterator[Batch], num_micro_batches: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss of the next micro-batches over all data-parallel ranks."""
        self._forget_shapes()
        return self._step.evaluate(batches, num_micro_batches, is_stopping)
