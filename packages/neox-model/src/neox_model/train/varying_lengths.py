"""A training step whose samples are cut to a length that changes from iteration to iteration."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from neox_model.train.batch import Batch
from neox_model.train.step import StepReport, TrainStep

__all__ = ["VaryingLengths"]


class VaryingLengths:
    """A step that is told before each use that lengths may have changed, and reports the tokens there were.

    Args:
        step: does the work.
        tokens: of the current iteration, over all data-parallel ranks.
        forget_shapes: called before the step is used; pipeline stages then tell each other the shape of
            what they send anew.
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

    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Mean loss of the next micro-batches, over data-parallel ranks too."""
        self._forget_shapes()
        return self._step.evaluate(batches, num_micro_batches)
