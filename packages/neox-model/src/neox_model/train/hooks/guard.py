"""Check that losses and gradient norms are finite, and act on loss spikes: report, limit skips, or roll back.

The optimizer skips an update whose loss or gradients are not finite, on the device. In float16 this is normal
while the loss scale can still decrease. Otherwise it is reported with the documents of the batch.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

from torch import Tensor

from neox_config.counted import counted
from neox_config.errors import NeoXError
from neox_config.facts.spikes import REPEATED_SPIKES, ROLLBACK
from neox_model.checkpoint.errors import CheckpointError
from neox_model.metrics.events import NO_EVENTS, Events
from neox_model.train.data.position import Ranges, merged
from neox_model.train.hooks.base import Hook
from neox_model.train.state import StepReport, TrainState, read_back

__all__ = ["NonfiniteGuard", "RepeatedSpikesError", "RollbackError", "SpikeHandler"]

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


class NonfiniteGuard(Hook):
    """Reports skipped updates, and ends the training after several in a row.

    The reports of an interval are read from the device together, one iteration late. All ranks read the same
    numbers, so all end at the same iteration.

    Args:
        patience: number of skipped updates in a row that ends the training, not counting those after which
            the loss scale can still decrease.
        interval: iterations between two readings.
        min_loss_scale: lower bound of the loss scale; None if the loss is not scaled.
        documents: function of a range of training samples that names their documents.
        reports: True if this rank writes to the log.
        before_end: called on all ranks before the training is ended, to write pending logs and to complete
            the save under way.
        events: records each skipped update.
        on_spike: called with every iteration whose loss is a spike, on all ranks; may end the training. An
            update that was skipped because of a spike does not count as one that is not finite. None: spikes
            are ignored.
    """

    def __init__(
        self,
        *,
        patience: int,
        interval: int,
        min_loss_scale: float | None,
        documents: Callable[[range], str],
        reports: bool,
        before_end: Callable[[], None],
        events: Events = NO_EVENTS,
        on_spike: Callable[[Iteration], None] | None = None,
    ) -> None:
        self._events = events
        self._patience = patience
        self._interval = interval
        self._min_loss_scale = min_loss_scale
        self._documents = documents
        self._reports = reports
        self._before_end = before_end
        self._on_spike = on_spike
        self._pending: list[tuple[int, range, StepReport]] = []
        self._in_a_row: list[Iteration] = []
        self._last: Iteration | None = None

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Store the report, and check those of a completed interval.

        Raises:
            NeoXError: the last `patience` iterations were not finite.
        """
        if (state.iteration - 1) % self._interval == 0:
            self.catch_up()
        if report.loss is None:
            return
        samples = range(state.samples - state.samples_per_iteration, state.samples)
        self._pending.append((state.iteration, samples, report))

    def on_end(self, state: TrainState) -> None:
        """Check the remaining reports."""
        self.catch_up()

    def catch_up(self) -> None:
        """Check all iterations so far; waits for the device.

        Raises:
            NeoXError: the last `patience` iterations were not finite; on all ranks or on none.
        """
        pending, self._pending = self._pending, []
        numbers = iter(read_back([value for _, _, report in pending for value in _numbers(report)]))
        for number, samples, _ in pending:
            iteration = Iteration(
                number=number,
                samples=samples,
                loss=next(numbers) or 0.0,
                grad_norm=next(numbers),
                skipped=bool(next(numbers)),
                loss_scale=next(numbers),
                spike_limit=next(numbers),
                spiked=bool(next(numbers)),
            )
            self._judge(iteration)

    def refuse_to_save(self) -> None:
        """Refuse to save if the loss of the last iteration is not finite.

        Raises:
            CheckpointError: the loss is not finite. Tensor-parallel ranks may have different losses.
        """
        if self._last is not None and not math.isfinite(self._last.loss):
            raise CheckpointError(
                f"the loss of iteration {self._last.number:,} is {self._last.loss:g}; the state after this "
                "iteration is not saved, and earlier checkpoints are kept"
            )

    def _judge(self, iteration: Iteration) -> None:
        self._last = iteration
        if iteration.spiked and self._on_spike is not None:
            self._on_spike(iteration)
        if iteration.is_finite or (iteration.spiked and math.isfinite(iteration.grad_norm or 0.0)):
            self._in_a_row.clear()
            return
        scale, floor = iteration.loss_scale, self._min_loss_scale
        if scale is not None and floor is not None and scale > floor:
            self._in_a_row.clear()
            self._record(iteration, "overflow", documents=None)
            if self._reports:
                logger.info("%s: float16 overflow, the update is skipped", iteration)
            return
        self._in_a_row.append(iteration)
        if self._reports:
            documents = self._documents(iteration.samples)
            self._record(iteration, "not finite", documents=documents)
            logger.error(
                "%s: the update is skipped; its batch contains samples %d to %d, from %s",
                iteration,
                iteration.samples.start,
                iteration.samples.stop - 1,
                documents,
            )
        if len(self._in_a_row) >= self._patience:
            self._before_end()
            listed = "; ".join(str(each) for each in self._in_a_row[-3:])
            at_minimum = "" if floor is None else f" with the loss scale at its minimum, {floor:g}"
            count = counted(len(self._in_a_row), "update in a row was", "updates in a row were")
            raise NeoXError(
                f"the last {count} skipped{at_minimum}, because a loss "
                f"or a gradient was not finite ({listed}); resume from the last checkpoint with a smaller "
                f"learning rate, {'with bfloat16, ' if at_minimum else ''}with gradient-clipping, or without "
                "these documents (nonfinite-patience sets how many skipped updates in a row are allowed)"
            )

    def _record(self, iteration: Iteration, reason: str, *, documents: str | None) -> None:
        self._events.record(
            "skipped",
            iteration.number,
            reason=reason,
            loss=iteration.loss,
            grad_norm=iteration.grad_norm,
            loss_scale=iteration.loss_scale,
            first_sample=iteration.samples.start,
            last_sample=iteration.samples.stop - 1,
            documents=documents,
        )


def _numbers(report: StepReport) -> tuple[Tensor | float | None, ...]:
    """Return a report's numbers in the order of the fields of `Iteration`."""
    return (
        report.loss,
        report.grad_norm,
        report.skipped,
        report.loss_scale,
        report.spike_limit,
        report.spiked,
    )


class RollbackError(NeoXError):
    """A loss is a spike; the training resumes from a checkpoint without its batch."""

    exit_code = ROLLBACK


class RepeatedSpikesError(NeoXError):
    """Too many losses in succession are spikes."""

    exit_code = REPEATED_SPIKES


class SpikeHandler:
    """Logs and records every spike with the documents of its batch, and does what `on_spike` requests.

    All ranks receive the same iterations, so all end at the same one.

    Args:
        action: the parameter `on_spike`.
        patience: the training ends at this many consecutive spikes (skip), or at a spike after this many
            rollbacks to the checkpoint that it would resume from (rollback).
        batches: number of batches that a rollback leaves out.
        state: the state of the training, before its first iteration.
        documents: function of a range of training samples that names their documents.
        reports: True if this rank writes to the log.
        before_end: called on all ranks before the training is ended, to write pending logs and to complete
            the save under way.
        leave_out: stores the samples that a rollback leaves out; collective over all ranks.
        events: records each spike.
    """

    def __init__(
        self,
        action: Literal["continue", "skip", "rollback"],
        *,
        patience: int,
        batches: int,
        state: TrainState,
        documents: Callable[[range], str],
        reports: bool,
        before_end: Callable[[], None],
        leave_out: Callable[[Ranges], None],
        events: Events = NO_EVENTS,
    ) -> None:
        self._action = action
        self._events = events
        self._patience = patience
        self._batches = batches
        self._state = state
        self._first_iteration, self._first_sample = state.iteration, state.samples
        self._resumed_sample = state.samples
        self._documents = documents
        self._reports = reports
        self._before_end = before_end
        self._leave_out = leave_out
        self._in_a_row = 0
        self._last = 0

    def __call__(self, spike: Iteration) -> None:
        """Handle one spike; spikes arrive in order.

        Raises:
            RollbackError: the training must resume without this batch.
            RepeatedSpikesError: it must not, because there have been too many.
        """
        if self._reports:
            self._events.record(
                "spike",
                spike.number,
                loss=spike.loss,
                limit=spike.spike_limit,
                action=self._action,
                first_sample=spike.samples.start,
                last_sample=spike.samples.stop - 1,
                documents=self._documents(spike.samples),
            )
        if self._action == "rollback":
            self._roll_back(spike)
        if self._reports:
            result = "skipped" if self._action == "skip" else "applied"
            batch = self._data(spike.samples)
            logger.warning("%s; its update is %s; its batch contains %s", _described(spike), result, batch)
        if self._action == "skip":
            self._limit_skips(spike)

    def saved(self, iteration: int) -> None:
        """Note that the checkpoint of this iteration is complete: a rollback resumes from it."""
        done = iteration - self._first_iteration
        self._resumed_sample = self._first_sample + done * self._state.samples_per_iteration

    def _limit_skips(self, spike: Iteration) -> None:
        self._in_a_row = self._in_a_row + 1 if spike.number == self._last + 1 else 1
        self._last = spike.number
        if self._in_a_row >= self._patience:
            self._before_end()
            skipped = counted(self._in_a_row, "update in a row was", "updates in a row were")
            raise RepeatedSpikesError(
                f"the last {skipped} skipped because of spikes of the loss: "
                f"{_described(spike)}; its batch contains {self._data(spike.samples)}; {_REMEDY}"
            )

    def _roll_back(self, spike: Iteration) -> NoReturn:
        self._before_end()
        size = self._state.samples_per_iteration
        first = max(self._resumed_sample, spike.samples.stop - self._batches * size)
        left_out = range(first, spike.samples.stop)
        earlier = [samples for samples in self._state.left_out if samples[1] > self._resumed_sample]
        if len(earlier) >= self._patience:
            raise RepeatedSpikesError(
                f"{_described(spike)}, after {len(earlier)} rollbacks to the checkpoint at sample "
                f"{self._resumed_sample:,}; its batch contains {self._data(spike.samples)}; {_REMEDY}"
            )
        self._leave_out(merged(self._state.left_out, [(left_out.start, left_out.stop)]))
        raise RollbackError(
            f"{_described(spike)}; its batch contains {self._data(spike.samples)}; when the training resumes "
            f"from the last checkpoint (max-restarts restarts it), it leaves out samples {left_out.start} to "
            f"{left_out.stop - 1}"
        )

    def _data(self, samples: range) -> str:
        return f"samples {samples.start} to {samples.stop - 1}, from {self._documents(samples)}"


def _described(spike: Iteration) -> str:
    limit = "" if spike.spike_limit is None else f" (the limit is {spike.spike_limit:g})"
    return f"the loss of iteration {spike.number:,}, {spike.loss:g}, is a spike{limit}"
