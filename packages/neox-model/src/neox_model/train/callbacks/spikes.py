"""Detect spikes of the loss, and act on them: report, limit skips, or roll back."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NoReturn, Self

from torch import Tensor
from torch.distributed import ReduceOp

from neox_config.errors import NeoXError
from neox_config.facts.spikes import REPEATED_SPIKES, ROLLBACK
from neox_config.pluralize import pluralize
from neox_model.engine.contract import PendingUpdate
from neox_model.parallel.collectives import all_reduce
from neox_model.train.data.batch import Batch
from neox_model.train.data.position import merged
from neox_model.train.loading import leave_out
from neox_model.train.recent_losses import is_spike
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport
from neox_model.train.step import TrainStep

__all__ = ["Iteration", "RepeatedSpikesError", "RollbackError", "SpikeDetection", "SpikeHandler"]

logger = logging.getLogger(__name__)

_REMEDY = (
    "check these documents (neox-data trace), lower the learning rate, or clip gradients; spike-threshold "
    "and spike-patience set what is allowed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The report of one iteration, read from the device.

    Args:
        number: of the iteration, from 1.
        samples: the samples of its batch.
        loss: its loss.
        grad_norm: norm of its gradients; None if it was not computed.
        skipped: the update was skipped.
        loss_scale: its loss scale; None if the loss is not scaled.
        spike_limit: limit above which its loss is a spike; None if losses are not compared.
        spiked: its loss is a spike.
    """

    number: int
    samples: range
    loss: float
    grad_norm: float | None
    skipped: bool
    loss_scale: float | None
    spike_limit: float | None = None
    spiked: bool = False

    @property
    def is_finite(self) -> bool:
        """Return True if the update was applied, and its numbers are finite."""
        return not self.skipped and math.isfinite(self.loss) and math.isfinite(self.grad_norm or 0.0)

    def __str__(self) -> str:
        norm = "" if self.grad_norm is None else f", gradient norm {self.grad_norm:g}"
        scale = "" if self.loss_scale is None else f", loss scale {self.loss_scale:g}"
        return f"iteration {self.number:,}: loss {self.loss:g}{norm}{scale}"


class RollbackError(NeoXError):
    """A loss is a spike; the run resumes from a checkpoint without its batch."""

    exit_code = ROLLBACK


class RepeatedSpikesError(NeoXError):
    """Too many losses in succession are spikes."""

    exit_code = REPEATED_SPIKES


class SpikeDetection(Callback):
    """Compares the loss of each update with those of recent ones, on the device.

    Args:
        threshold: distance of the limit from the median of `run.state.recent_losses`, in deviations.
        skips: leave an update out if its loss is a spike.
    """

    def __init__(self, threshold: float, *, skips: bool) -> None:
        self._threshold, self._skips = threshold, skips
        self._limit: Tensor | None = None
        self._left_out: Tensor | None = None

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if losses are compared."""
        if run.state.recent_losses is None:
            return None
        found = cls(run.config.training.spike_threshold, skips=run.config.training.on_spike == "skip")
        if found._skips:
            run.engine.update.before(found.decide)
        return found

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Add the loss of an applied update to the recent ones."""
        losses = self.run.state.recent_losses
        assert losses is not None, "losses are compared"
        self._limit = losses.limit(self._threshold)
        report = step(batches)
        assert report.loss is not None, "a step inside trains on every batch"
        # Tensor-parallel ranks may have different losses.
        loss = all_reduce(report.loss.detach().clone(), self.run.groups.model, ReduceOp.MAX)
        skipped = report.skipped
        spiked = is_spike(loss, self._limit) if self._left_out is None else self._left_out
        losses.add(loss, is_applied=~skipped if isinstance(skipped, Tensor) else not skipped)
        return replace(report, spike_limit=self._limit, spiked=spiked)

    def decide(self, pending: PendingUpdate) -> None:
        """Leave an update out if its loss is a spike."""
        assert self._limit is not None, "an update is inside a step"
        self._left_out = is_spike(pending.loss(), self._limit)
        pending.leave_out(self._left_out)


class SpikeHandler(Callback):
    """Logs and records every spike with the documents of its batch, and does what `on_spike` requests.

    All ranks receive the same iterations from `NonfiniteGuard`, so all end at the same one.

    Args:
        action: the parameter `on_spike`.
        patience: the run ends at this many consecutive spikes (skip), or at a spike after this many rollbacks
            to the checkpoint that it would resume from (rollback).
        batches: number of batches that a rollback leaves out.
    """

    def __init__(
        self, action: Literal["continue", "skip", "rollback"], *, patience: int, batches: int
    ) -> None:
        self._action, self._patience, self._batches = action, patience, batches
        self._in_a_row = 0
        self._last = 0

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `on_spike` is set."""
        section = run.config.training
        if section.on_spike is None:
            return None
        return cls(section.on_spike, patience=section.spike_patience, batches=section.spike_rollback_batches)

    def on_load(self) -> None:
        """Note where a rollback resumes."""
        self._first_iteration, self._first_sample = self.run.state.iteration, self.run.state.samples
        self._resumed_sample = self.run.state.samples

    def after_save(self, iteration: int) -> None:
        """Note that a rollback resumes from this checkpoint."""
        done = iteration - self._first_iteration
        self._resumed_sample = self._first_sample + done * self.run.state.samples_per_iteration

    def handle(self, spike: Iteration) -> None:
        """Handle one spike; spikes arrive in order.

        Raises:
            RollbackError: the run must resume without this batch.
            RepeatedSpikesError: it must not, because there have been too many.
        """
        reports = self.run.groups.world.rank == 0
        if reports:
            self.run.events.record(
                "spike",
                spike.number,
                loss=spike.loss,
                limit=spike.spike_limit,
                action=self._action,
                first_sample=spike.samples.start,
                last_sample=spike.samples.stop - 1,
                documents=self.run.documents(spike.samples),
            )
        if self._action == "rollback":
            self._roll_back(spike)
        if reports:
            result = "skipped" if self._action == "skip" else "applied"
            batch = _data(self.run, spike.samples)
            logger.warning("%s; its update is %s; its batch contains %s", _described(spike), result, batch)
        if self._action == "skip":
            self._limit_skips(spike)

    def _limit_skips(self, spike: Iteration) -> None:
        self._in_a_row = self._in_a_row + 1 if spike.number == self._last + 1 else 1
        self._last = spike.number
        if self._in_a_row >= self._patience:
            self.run.settle()
            skipped = pluralize(self._in_a_row, "update in a row was", "updates in a row were")
            raise RepeatedSpikesError(
                f"the last {skipped} skipped because of spikes of the loss: "
                f"{_described(spike)}; its batch contains {_data(self.run, spike.samples)}; {_REMEDY}"
            )

    def _roll_back(self, spike: Iteration) -> NoReturn:
        self.run.settle()
        state = self.run.state
        first = max(self._resumed_sample, spike.samples.stop - self._batches * state.samples_per_iteration)
        left_out = range(first, spike.samples.stop)
        earlier = [samples for samples in state.left_out if samples[1] > self._resumed_sample]
        if len(earlier) >= self._patience:
            raise RepeatedSpikesError(
                f"{_described(spike)}, after {len(earlier)} rollbacks to the checkpoint at sample "
                f"{self._resumed_sample:,}; its batch contains {_data(self.run, spike.samples)}; {_REMEDY}"
            )
        leave_out(self.run, merged(state.left_out, [(left_out.start, left_out.stop)]))
        raise RollbackError(
            f"{_described(spike)}; its batch contains {_data(self.run, spike.samples)}; when the run resumes "
            f"from the last checkpoint (max-restarts restarts it), it leaves out samples {left_out.start} to "
            f"{left_out.stop - 1}"
        )


def _data(run: Run, samples: range) -> str:
    return f"samples {samples.start} to {samples.stop - 1}, from {run.documents(samples)}"


def _described(spike: Iteration) -> str:
    limit = "" if spike.spike_limit is None else f" (the limit is {spike.spike_limit:g})"
    return f"the loss of iteration {spike.number:,}, {spike.loss:g}, is a spike{limit}"
