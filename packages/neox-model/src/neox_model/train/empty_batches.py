"""A training step that reports micro-batches in which no token counts in the loss."""

import logging
from collections.abc import Callable, Iterator

from torch import Tensor

from neox_config.counted import counted
from neox_model.checkpoint.outcome import gather
from neox_model.engine.contract import IsStopping, never
from neox_model.parallel.groups import Groups
from neox_model.train.data.batch import Batch
from neox_model.train.step import StepReport, TrainStep

__all__ = ["EmptyMicroBatches"]

logger = logging.getLogger(__name__)


class EmptyMicroBatches:
    """Wraps a step that averages micro-batches: warns once if one without a target counts as a loss of 0.

    Args:
        step: the wrapped step.
        groups: this job's process groups; one rank of each replica counts.
        is_due: returns True in iterations after which the counts of all ranks are added, on all ranks.
    """

    def __init__(self, step: TrainStep, groups: Groups, *, is_due: Callable[[], bool]) -> None:
        self._step = step
        self._control = groups.control
        self._counts = groups.model.rank == 0 and groups.pipe.rank == 0
        self._is_due = is_due
        self._has_warned = False
        self._empty = self._all = 0

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        if self._has_warned:
            return self._step(batches)
        report = self._step(self._counted(batches) if self._counts else batches)
        if self._is_due():
            self._warn()
        return report

    def evaluate(
        self, batches: Iterator[Batch], num_micro_batches: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the unmasked tokens of the next micro-batches of all ranks."""
        return self._step.evaluate(batches, num_micro_batches, is_stopping)

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._all += 1
            self._empty += not bool(batch.loss_mask_BS.any())
            yield batch

    def _warn(self) -> None:
        """Warn of what was counted on all ranks, which they then no longer count. Collective."""
        found = gather(self._control, (self._empty, self._all))
        empty, total = (sum(column) for column in zip(*found, strict=True))
        self._has_warned = empty > 0
        if empty and self._control.rank == 0:
            logger.warning(
                "%d of %s had no token that counts in the loss, and each was a loss of 0 in the mean over "
                "micro-batches: the loss and the gradients are too small; set loss-normalization: global to "
                "average over tokens",
                empty,
                counted(total, "micro-batch", "micro-batches"),
            )
