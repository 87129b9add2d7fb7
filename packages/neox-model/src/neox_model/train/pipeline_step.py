"""One iteration of a model that is split into pipeline stages; DeepSpeed's engine runs the schedule."""

from collections.abc import Iterator

from torch import Tensor

from neox_model.train.batch import Batch
from neox_model.train.engine import Engine
from neox_model.train.step import StepReport

__all__ = ["PipelineStep"]

StageInput = tuple[Tensor, tuple[Tensor, Tensor]]


class PipelineStep:
    """All micro-batches of an update at once, through all stages.

    The engine pulls micro-batches on the first and the last stage only: stages between may be given an
    empty iterator.

    Args:
        engine: a pipeline engine, whose module computes the loss.
        tokens: tokens of one update, over all data-parallel ranks.
    """

    def __init__(self, engine: Engine, *, tokens: int) -> None:
        self._engine = engine
        self._tokens = tokens

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        loss = self._engine.inner.train_batch(data_iter=_stage_inputs(batches))
        return StepReport(
            loss=loss.detach(),
            grad_norm=self._engine.grad_norm,
            skipped=self._engine.skipped_last_update,
            tokens=self._tokens,
        )

    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Mean loss of the next micro-batches, over data-parallel ranks too."""
        loss = self._engine.inner.eval_batch(_stage_inputs(batches), num_micro_batches=num_micro_batches)
        return loss.detach()


def _stage_inputs(batches: Iterator[Batch]) -> Iterator[StageInput]:
    """Batches as the engine wants them: what the first stage gets, and what the last one compares with."""
    for batch in batches:
        yield batch.tokens_BS, (batch.labels_BS, batch.loss_mask_BS)
