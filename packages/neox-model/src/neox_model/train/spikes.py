"""Training steps that detect loss spikes, and that leave out batches."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from torch import Tensor

from neox_model.engine.contract import IsStopping, PendingUpdate, Update, never
from neox_model.train.data.batch import Batch
from neox_model.train.recent_losses import RecentLosses, is_spike
from neox_model.train.step import StepReport, TrainStep

__all__ = ["LeftOutBatches", "SpikeDetection"]


class SpikeDetection:
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
        self._step = step
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
        loss = self._agreed(report.loss)
        spiked = is_spike(loss, self._limit) if self._left_out is None else self._left_out
        self._losses.add(loss, is_applied=_negated(report.skipped))
        return replace(report, spike_limit=self._limit, spiked=spiked)

    def evaluate(
        self, batches: Iterator[Batch], num_micro_batches: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss of the next micro-batches over all data-parallel ranks."""
        return self._step.evaluate(batches, num_micro_batches, is_stopping)

    def _decide(self, pending: PendingUpdate) -> None:
        self._left_out = is_spike(pending.loss(), self._limit)
        pending.leave_out(self._left_out)


class LeftOutBatches:
    """Wraps a step: reads the micro-batches of an iteration that is left out, and computes nothing.

    The samples keep their place in the order of all samples, so iterations read the same ones as without it.

    Args:
        step: the wrapped step.
        accumulation: micro-batches per iteration.
        is_left_out: returns whether the next iteration is left out.
    """

    def __init__(self, step: TrainStep, *, accumulation: int, is_left_out: Callable[[], bool]) -> None:
        self._step = step
        self._accumulation = accumulation
        self._is_left_out = is_left_out

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches, or only read them."""
        if not self._is_left_out():
            return self._step(batches)
        for _ in islice(batches, self._accumulation):
            pass
        return StepReport(loss=None, grad_norm=None, skipped=True, tokens=0)

    def evaluate(
        self, batches: Iterator[Batch], num_micro_batches: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss of the next micro-batches over all data-parallel ranks."""
        return self._step.evaluate(batches, num_micro_batches, is_stopping)


def _negated(flag: Tensor | bool) -> Tensor | bool:
    return ~flag if isinstance(flag, Tensor) else not flag
