"""The state of a run that changes and is saved in checkpoints, and the report of an iteration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from neox_data.batch_sizes import BatchSizes
from neox_model.train.data.position import Position, Ranges
from neox_model.train.recent_losses import RecentLosses

__all__ = ["StepReport", "TrainState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The results of one iteration.

    Scalars stay on the device, so that reporting does not synchronize with it; callbacks read many at once.

    Args:
        loss: mean over micro-batches and data-parallel ranks, the same on every rank; None if the batch was
            left out, and nothing was computed.
        grad_norm: global 2-norm of the gradients before clipping; None if it was not computed.
        skipped: True if the update was skipped because a gradient or the loss was not finite, or the loss was
            a spike.
        tokens: tokens of this iteration, over all data-parallel ranks.
        loss_scale: loss scale of this iteration in float16; None in other precisions.
        spike_limit: limit above which the loss is a spike; None if losses are not compared.
        spiked: True if the loss is a spike.
        z_loss: the same mean of the term of `z_loss`; None without.
        expert_load: tokens of the expert with the most, divided by the mean; mean over layers; None without
            experts.
        expert_entropy: entropy of the experts' shares of the tokens, divided by its largest value; likewise.
    """

    loss: Tensor | None
    grad_norm: Tensor | float | None
    skipped: Tensor | bool
    tokens: int
    loss_scale: Tensor | float | None = None
    spike_limit: Tensor | None = None
    spiked: Tensor | bool = False
    z_loss: Tensor | None = None
    expert_load: Tensor | None = None
    expert_entropy: Tensor | None = None


@dataclass(kw_only=True)
class TrainState:
    """Progress of the run.

    Args:
        last_iteration: number of iterations after which the run is complete.
        samples_per_iteration: of this run, over all data-parallel ranks.
        iteration: finished optimizer updates, including skipped ones, which also used their data.
        skipped_iterations: updates skipped because a gradient or the loss was not finite, or the loss was a
            spike; may be a tensor on the device.
        tokens: training tokens seen by all data-parallel ranks.
        samples: training samples read by all data-parallel ranks.
        validation_samples: validation samples used by evaluations.
        due_validation: first sample of the evaluation that is due after this iteration; None: none, or it is
            done.
        batch_sizes: (iteration, samples) pairs: samples per iteration, starting at that iteration.
        left_out: ranges of samples that are read but not trained on.
        recent_losses: losses with which the next one is compared; None: none.
        forward_pass: result of `ForwardCheck` at the last save or load; None: none.
        stop_reason: why the run ends before its last iteration; not saved.
        is_hurried: shutdown is urgent: only save.
    """

    last_iteration: int
    samples_per_iteration: int
    iteration: int = 0
    skipped_iterations: Tensor | int = 0
    tokens: int = 0
    samples: int = 0
    validation_samples: int = 0
    due_validation: int | None = None
    batch_sizes: tuple[tuple[int, int], ...] = ()
    left_out: Ranges = ()
    recent_losses: RecentLosses | None = None
    forward_pass: Mapping[str, Any] | None = None
    stop_reason: str | None = None
    is_hurried: bool = False

    @property
    def finished(self) -> bool:
        """Return True if the loop must end now."""
        return self.stop_reason is not None or self.iteration >= self.last_iteration

    @property
    def position(self) -> Position:
        """Return the position in the data."""
        return Position(
            iteration=self.iteration,
            samples=self.samples,
            validation_samples=self.validation_samples,
            due_validation=self.due_validation,
            batch_sizes=self.batch_sizes,
            left_out=self.left_out,
        )

    @property
    def leaves_out_next(self) -> bool:
        """Return True if the next iteration reads a sample that is left out."""
        stop = self.samples + self.samples_per_iteration
        return any(first < stop and self.samples < end for first, end in self.left_out)

    def advance(self, report: StepReport) -> None:
        """Count one iteration."""
        sizes = BatchSizes(self.batch_sizes).then(self.iteration, self.samples_per_iteration)
        self.batch_sizes = sizes.changes
        self.iteration += 1
        self.skipped_iterations = self.skipped_iterations + report.skipped
        self.tokens += report.tokens
        self.samples += self.samples_per_iteration

    def take_validation_samples(self, count: int) -> int:
        """Reserve the next `count` validation samples for an evaluation; return the first of them."""
        first = self.validation_samples
        self.validation_samples += count
        return first

    def request_stop(self, reason: str, *, is_hurried: bool = False) -> None:
        """End the loop after this iteration; every rank must call this at the same iteration."""
        self.stop_reason = self.stop_reason or reason
        self.is_hurried = self.is_hurried or is_hurried

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {
            "iteration": self.iteration,
            "skipped_iterations": int(self.skipped_iterations),
            "tokens": self.tokens,
            "samples": self.samples,
            "validation_samples": self.validation_samples,
            "due_validation": self.due_validation,
            "batch_sizes": [list(change) for change in self.batch_sizes],
            "left_out": [list(samples) for samples in self.left_out],
            "recent_losses": [] if self.recent_losses is None else self.recent_losses.values(),
            "forward_pass": self.forward_pass,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        position = Position.from_state(state)
        self.iteration, self.samples = position.iteration, position.samples
        self.validation_samples, self.batch_sizes = position.validation_samples, position.batch_sizes
        self.left_out, self.due_validation = position.left_out, position.due_validation
        if self.recent_losses is not None:
            self.recent_losses.load(state.get("recent_losses", ()))
        self.forward_pass = state.get("forward_pass")
        self.skipped_iterations = int(state["skipped_iterations"])
        self.tokens = int(state["tokens"])
