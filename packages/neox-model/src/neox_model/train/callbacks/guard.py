"""Check that losses and gradient norms are finite.

The optimizer skips an update whose loss or gradients are not finite, on the device. In float16 this is normal
while the loss scale can still decrease. Otherwise it is reported with the documents of the batch.
"""

import logging
import math
from typing import Self

from torch import Tensor

from neox_config.errors import NeoXError
from neox_config.pluralize import pluralize
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.metrics.bus import read_back
from neox_model.train.callbacks.spikes import Iteration, SpikeHandler
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["NonfiniteGuard"]

logger = logging.getLogger(__name__)


class NonfiniteGuard(Callback):
    """Reports skipped updates, and ends the run after several in a row.

    The reports of an interval are read from the device together, one iteration late. All ranks read the same
    numbers, so all end at the same iteration.

    Args:
        patience: number of skipped updates in a row that ends the run, not counting those after which the
            loss scale can still decrease.
        interval: iterations between two readings.
        min_loss_scale: lower bound of the loss scale; None if the loss is not scaled.
        spikes: acts on every iteration whose loss is a spike, on all ranks; may end the run. An update that
            was skipped because of a spike does not count as one that is not finite. None: spikes are ignored.
    """

    def __init__(
        self,
        *,
        patience: int,
        interval: int,
        min_loss_scale: float | None,
        spikes: SpikeHandler | None = None,
    ) -> None:
        self._patience, self._interval = patience, interval
        self._min_loss_scale = min_loss_scale
        self._spikes = spikes
        self._pending: list[tuple[int, range, StepReport]] = []
        self._in_a_row: list[Iteration] = []
        self._last: Iteration | None = None

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Build it; on a GPU every reading synchronizes."""
        on_gpu = run.engine.device.type == "cuda"
        return cls(
            patience=run.config.training.nonfinite_patience,
            interval=min(run.config.logging.log_interval, 100) if on_gpu else 1,
            min_loss_scale=run.engine.update.min_loss_scale,
            spikes=run.callback(SpikeHandler),
        )

    def on_step(self, report: StepReport) -> None:
        """Store the report, and check those of a completed interval.

        Raises:
            NeoXError: the last `patience` iterations were not finite.
        """
        state = self.run.state
        if (state.iteration - 1) % self._interval == 0:
            self.catch_up()
        if report.loss is None:
            return
        samples = range(state.samples - state.samples_per_iteration, state.samples)
        self._pending.append((state.iteration, samples, report))

    def on_end(self) -> None:
        """Check the remaining reports."""
        self.catch_up()

    def before_save(self) -> None:
        """Refuse to save if the loss of the last iteration is not finite.

        Raises:
            CheckpointError: it is not finite. Tensor-parallel ranks may have different losses.
        """
        self.catch_up()
        with shared_outcome(self.run.groups.control, "checking the last iteration"):
            if self._last is not None and not math.isfinite(self._last.loss):
                raise CheckpointError(
                    f"the loss of iteration {self._last.number:,} is {self._last.loss:g}; the state after "
                    "this iteration is not saved, and earlier checkpoints are kept"
                )

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

    def _judge(self, iteration: Iteration) -> None:
        self._last, reports = iteration, self.run.groups.world.rank == 0
        if iteration.spiked and self._spikes is not None:
            self._spikes.handle(iteration)
        if iteration.is_finite or (iteration.spiked and math.isfinite(iteration.grad_norm or 0.0)):
            self._in_a_row.clear()
            return
        scale, floor = iteration.loss_scale, self._min_loss_scale
        if scale is not None and floor is not None and scale > floor:
            self._in_a_row.clear()
            _record_skip(self.run, iteration, "overflow", documents=None)
            if reports:
                logger.info("%s: float16 overflow, the update is skipped", iteration)
            return
        self._in_a_row.append(iteration)
        if reports:
            documents = self.run.documents(iteration.samples)
            _record_skip(self.run, iteration, "not finite", documents=documents)
            logger.error(
                "%s: the update is skipped; its batch contains samples %d to %d, from %s",
                iteration,
                iteration.samples.start,
                iteration.samples.stop - 1,
                documents,
            )
        if len(self._in_a_row) >= self._patience:
            self.run.settle()
            listed = "; ".join(str(each) for each in self._in_a_row[-3:])
            at_minimum = "" if floor is None else f" with the loss scale at its minimum, {floor:g}"
            count = pluralize(len(self._in_a_row), "update in a row was", "updates in a row were")
            raise NeoXError(
                f"the last {count} skipped{at_minimum}, because a loss "
                f"or a gradient was not finite ({listed}); resume from the last checkpoint with a smaller "
                f"learning rate, {'with bfloat16, ' if at_minimum else ''}with gradient-clipping, or without "
                "these documents (nonfinite-patience sets how many skipped updates in a row are allowed)"
            )


def _record_skip(run: Run, iteration: Iteration, reason: str, *, documents: str | None) -> None:
    run.events.record(
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
