"""Act on loss spikes, which the guard reads from the device: report them, limit skips, or roll back."""

import logging
from collections.abc import Callable
from typing import Literal

from neox_config.counted import counted
from neox_config.errors import NeoXError
from neox_config.facts.spikes import REPEATED_SPIKES, ROLLBACK
from neox_model.metrics.events import NO_EVENTS, Events
from neox_model.train.data.position import Ranges
from neox_model.train.hooks.guard import Iteration
from neox_model.train.left_out import merged
from neox_model.train.state import TrainState

__all__ = ["RepeatedSpikesError", "RollbackError", "SpikeHandler"]

logger = logging.getLogger(__name__)

_REMEDY = (
    "check these documents (neox-data trace), lower the learning rate, or clip gradients; spike-threshold "
    "and spike-patience set what is allowed"
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
        actions = {"continue": self._go_on, "skip": self._skip, "rollback": self._roll_back}
        self._action = action
        self._act = actions[action]
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
            self._record(spike)
        self._act(spike)

    def saved(self, iteration: int) -> None:
        """Note that the checkpoint of this iteration is complete: a rollback resumes from it."""
        done = iteration - self._first_iteration
        self._resumed_sample = self._first_sample + done * self._state.samples_per_iteration

    def _go_on(self, spike: Iteration) -> None:
        self._report(spike, "its update is applied")

    def _skip(self, spike: Iteration) -> None:
        self._report(spike, "its update is skipped")
        self._in_a_row = self._in_a_row + 1 if spike.number == self._last + 1 else 1
        self._last = spike.number
        if self._in_a_row >= self._patience:
            self._before_end()
            skipped = counted(self._in_a_row, "update in a row was", "updates in a row were")
            raise RepeatedSpikesError(
                f"the last {skipped} skipped because of spikes of the loss: "
                f"{_described(spike)}; its batch contains {self._data(spike.samples)}; {_REMEDY}"
            )

    def _roll_back(self, spike: Iteration) -> None:
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

    def _record(self, spike: Iteration) -> None:
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

    def _report(self, spike: Iteration, result: str) -> None:
        if self._reports:
            batch = self._data(spike.samples)
            logger.warning("%s; %s; its batch contains %s", _described(spike), result, batch)

    def _data(self, samples: range) -> str:
        return f"samples {samples.start} to {samples.stop - 1}, from {self._documents(samples)}"


def _described(spike: Iteration) -> str:
    limit = "" if spike.spike_limit is None else f" (the limit is {spike.spike_limit:g})"
    return f"the loss of iteration {spike.number:,}, {spike.loss:g}, is a spike{limit}"
