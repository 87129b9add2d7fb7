"""One training iteration: forward, backward and update."""

from collections.abc import Callable, Iterator

from torch import Tensor

from neox_model.engine.contract import Engine, IsStopping, MicroBatch, never
from neox_model.train.data.batch import Batch, TokenWeighting, unweighted, weighted_by_micro_batch
from neox_model.train.state import StepReport

__all__ = ["EngineStep", "TrainStep", "as_micro_batches"]

TrainStep = Callable[[Iterator[Batch]], StepReport]
"""Trains on the next micro-batches of an iteration. Collective over all ranks."""


class EngineStep:
    """Runs all micro-batches of an update, and reports its results.

    A pipeline reads micro-batches on the first and the last stage only; other stages may receive an empty
    iterator.

    Args:
        engine: an engine whose model computes the loss.
        accumulation: micro-batches per update.
        tokens: tokens per update, over all data-parallel ranks.
        weighting: sets the weight of each token of an update's micro-batches in the loss.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        accumulation: int,
        tokens: int = 0,
        weighting: TokenWeighting = weighted_by_micro_batch,
    ) -> None:
        self._engine = engine
        self.accumulation = accumulation
        self._tokens = tokens
        self.weighting = weighting

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        update = self._engine.update
        loss_scale = update.loss_scale
        weighted = self.weighting(batches, self.accumulation, self._engine.device)
        loss = self._engine.train_batch(as_micro_batches(weighted))
        return StepReport(
            loss=loss,
            grad_norm=update.grad_norm,
            skipped=update.skipped,
            tokens=self._tokens,
            loss_scale=loss_scale,
        )

    def evaluate(
        self, batches: Iterator[Batch], num_micro_batches: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the unmasked tokens of the next micro-batches of all data-parallel ranks.

        It is that of the model which a checkpoint of this moment contains. It ends early if `is_stopping`
        returns True, as `ForwardEngine.evaluate` does.
        """
        # Evaluations have the full length, which a curriculum's iterations may not have.
        self._engine.forget_shapes()
        taken = unweighted(batches, num_micro_batches, self._engine.device)
        with self._engine.update.with_shared_weights():
            return self._engine.evaluate(as_micro_batches(taken), num_micro_batches, is_stopping)


def as_micro_batches(batches: Iterator[Batch]) -> Iterator[MicroBatch]:
    """Yield (inputs, targets) of each batch."""
    return ((batch.inputs, batch.targets) for batch in batches)
