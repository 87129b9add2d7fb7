"""Training steps around others: for varying lengths, loss spikes, batches that are left out or empty."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from torch import Tensor

from neox_config.counted import counted
from neox_model.checkpoint.outcome import gather
from neox_model.engine.contract import IsStopping, PendingUpdate, Update, never
from neox_model.parallel.groups import Groups
from neox_model.train.data.batch import Batch
from neox_model.train.recent_losses import RecentLosses, is_spike
from neox_model.train.state import StepReport
from neox_model.train.step import TrainStep, WrappedStep

__all__ = ["EmptyMicroBatches", "LeftOutBatches", "SpikeDetection", "VaryingLengths"]

logger = logging.getLogger(__name__)


class EmptyMicroBatches(WrappedStep):
    """Wraps a step that averages micro-batches: warns once if one without a target counts as a loss of 0.

    Args:
        step: the wrapped step.
        groups: this job's process groups; one rank of each replica counts.
        is_due: returns True in iterations after which the counts of all ranks are added, on all ranks.
    """

    def __init__(self, step: TrainStep, groups: Groups, *, is_due: Callable[[], bool]) -> None:
        super().__init__(step)
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


class VaryingLengths(WrappedStep):
    """Wraps a step for sequence lengths that change between iterations.

    Resets cached shapes before each call, and reports the actual number of tokens.

    Args:
        step: the wrapped step.
        tokens: returns the tokens of the current iteration, over all data-parallel ranks.
        forget_shapes: called before the step; pipeline stages then exchange the shapes of their activations
            again.
    """

    def __init__(
        self, step: TrainStep, *, tokens: Callable[[], int], forget_shapes: Callable[[], None]
    ) -> None:
        super().__init__(step)
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
        return super().evaluate(batches, num_micro_batches, is_stopping)


class SpikeDetection(WrappedStep):
    """Wraps a step: compares its loss with those of recent updates, on the device.

    Args:
        step: the wrapped step.
        losses: the recent losses; the loss of an applied update is added.
        threshold: distance of the limit from the median of these losses, in deviations.
        skips: the update that is left out if its loss is a spike; None: every update is applied.
        agreed: returns the same loss on every rank; tensor-parallel ranks may have different ones.
    """

    def __init__(
        self,
        step: TrainStep,
        losses: RecentLosses,
        *,
        threshold: float,
        skips: Update | None,
        agreed: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> None:
        super().__init__(step)
        self._losses = losses
        self._threshold = threshold
        self._agreed = agreed
        self._limit = losses.limit(threshold)
        self._left_out: Tensor | None = None
        if skips is not None:
            skips.before(self._decide)

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        self._limit = self._losses.limit(self._threshold)
        report = self._step(batches)
        assert report.loss is not None, "the wrapped step trains on every batch"
        loss, skipped = self._agreed(report.loss), report.skipped
        spiked = is_spike(loss, self._limit) if self._left_out is None else self._left_out
        self._losses.add(loss, is_applied=~skipped if isinstance(skipped, Tensor) else not skipped)
        return replace(report, spike_limit=self._limit, spiked=spiked)

    def _decide(self, pending: PendingUpdate) -> None:
        self._left_out = is_spike(pending.loss(), self._limit)
        pending.leave_out(self._left_out)


class LeftOutBatches(WrappedStep):
    """Wraps a step: reads the micro-batches of an iteration that is left out, and computes nothing.

    The samples keep their place in the order of all samples, so iterations read the same ones as without it.

    Args:
        step: the wrapped step.
        accumulation: micro-batches per iteration.
        is_left_out: returns whether the next iteration is left out.
    """

    def __init__(self, step: TrainStep, *, accumulation: int, is_left_out: Callable[[], bool]) -> None:
        super().__init__(step)
        self._accumulation = accumulation
        self._is_left_out = is_left_out

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches, or only read them."""
        if not self._is_left_out():
            return self._step(batches)
        for _ in islice(batches, self._accumulation):
            pass
        return StepReport(loss=None, grad_norm=None, skipped=True, tokens=0)
