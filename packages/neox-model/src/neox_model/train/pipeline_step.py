"""One iteration of a model that is split into pipeline stages; DeepSpeed's engine runs the schedule."""

from collections.abc import Iterator

from torch import Tensor

from neox_model.train.batch import Batch, Weigh, as_they_are
from neox_model.train.engine import Engine
from neox_model.train.step import StepReport

__all__ = ["PipelineStep"]

StageInput = tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, Tensor]]


class PipelineStep:
    """All micro-batches of an update at once, through all stages.

    The engine pulls micro-batches on the first and the last stage only: stages between may be given an
    empty iterator.

    Args:
        engine: a pipeline engine, whose module computes the loss.
        accumulation: micro-batches per update.
        tokens: tokens of one update, over all data-parallel ranks.
        weigh: how much each token of an update's micro-batches counts.
    """

    def __init__(
        self, engine: Engine, *, accumulation: int = 1, tokens: int = 0, weigh: Weigh = as_they_are
    ) -> None:
        self._engine = engine
        self._accumulation = accumulation
        self._tokens = tokens
        self._weigh = weigh

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        loss_scale = self._engine.loss_scale
        loss = self._engine.inner.train_batch(data_iter=self._stage_inputs(batches, self._accumulation))
        return StepReport(
            loss=loss.detach(),
            grad_norm=self._engine.grad_norm,
            skipped=self._engine.skipped_last_update,
            tokens=self._tokens,
            loss_scale=loss_scale,
        )

    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Mean loss of the next micro-batches, over data-parallel ranks too."""
        loss = self._engine.inner.eval_batch(
            self._stage_inputs(batches, num_micro_batches), num_micro_batches=num_micro_batches
        )
        return loss.detach()

    def _stage_inputs(self, batches: Iterator[Batch], count: int) -> Iterator[StageInput]:
        """As the engine wants them: what the first stage gets, and what the last one compares with."""
        taken = self._weigh(batches, count, self._engine.inner.device)
        return ((batch.inputs, batch.targets) for batch in taken)
