"""Check that losses and gradient norms are finite, and end a training that no longer updates its weights.

The optimizer skips an update whose loss or gradients are not finite, on the device. In float16 this is normal
while the loss scale can still decrease. Otherwise it is reported with the documents of the batch.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from neox_config.counted import counted
from neox_config.errors import NeoXError
from neox_model.checkpoint.errors import CheckpointError
from neox_model.metrics.events import NO_EVENTS, Events
from neox_model.train.hooks.base import Hook
from neox_model.train.read_back import read_back
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["Iteration", "NonfiniteGuard"]

logger = logging.getLogger(__name__)


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
        for iteration in _read(pending):
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
        if self._scale_can_fall(iteration):
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
            raise NeoXError(self._why_it_ends())

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

    def _scale_can_fall(self, iteration: Iteration) -> bool:
        if self._min_loss_scale is None or iteration.loss_scale is None:
            return False
        return iteration.loss_scale > self._min_loss_scale

    def _why_it_ends(self) -> str:
        listed = "; ".join(str(iteration) for iteration in self._in_a_row[-3:])
        at_minimum = ""
        if self._min_loss_scale is not None:
            at_minimum = f" with the loss scale at its minimum, {self._min_loss_scale:g}"
        skipped = counted(len(self._in_a_row), "update in a row was", "updates in a row were")
        return (
            f"the last {skipped} skipped{at_minimum}, because a loss "
            f"or a gradient was not finite ({listed}); resume from the last checkpoint with a smaller "
            f"learning rate, {'with bfloat16, ' if at_minimum else ''}with gradient-clipping, or without "
            "these documents (nonfinite-patience sets how many skipped updates in a row are allowed)"
        )


def _read(pending: list[tuple[int, range, StepReport]]) -> list[Iteration]:
    """Read the reports' numbers from the device together."""
    numbers = iter(
        read_back(
            [
                value
                for _, _, report in pending
                for value in (
                    report.loss,
                    report.grad_norm,
                    report.skipped,
                    report.loss_scale,
                    report.spike_limit,
                    report.spiked,
                )
            ]
        )
    )
    return [
        Iteration(
            number=number,
            samples=samples,
            loss=next(numbers) or 0.0,
            grad_norm=next(numbers),
            skipped=bool(next(numbers)),
            loss_scale=next(numbers),
            spike_limit=next(numbers),
            spiked=bool(next(numbers)),
        )
        for number, samples, _ in pending
    ]
