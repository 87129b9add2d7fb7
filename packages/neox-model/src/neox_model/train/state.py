"""Everything about a training that changes and must survive a restart."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from neox_model.train.position import Position
from neox_model.train.step import StepReport

__all__ = ["TrainState"]


@dataclass(kw_only=True)
class TrainState:
    """Where the training is.

    Args:
        last_iteration: the training is complete after this many iterations.
        samples_per_iteration: of this run, over all data-parallel ranks.
        iteration: optimizer updates done so far, skipped ones included: each has used its data.
        skipped_iterations: those among them that were not applied, because a gradient or the loss was not
            finite; may be a tensor on the device.
        tokens: training tokens seen by all data-parallel ranks.
        samples: training samples read by all data-parallel ranks, in batches of whatever size.
        validation_samples: validation samples that the evaluations so far were given.
        stop_reason: why the training ends before its last iteration; not kept over a restart.
        is_hurried: somebody waits for the end: only what would be lost is still done.
    """

    last_iteration: int
    samples_per_iteration: int
    iteration: int = 0
    skipped_iterations: Tensor | int = 0
    tokens: int = 0
    samples: int = 0
    validation_samples: int = 0
    stop_reason: str | None = None
    is_hurried: bool = False

    @property
    def finished(self) -> bool:
        """Whether the loop must end now."""
        return self.stop_reason is not None or self.iteration >= self.last_iteration

    @property
    def position(self) -> Position:
        """How much data has been used."""
        return Position(
            iteration=self.iteration, samples=self.samples, validation_samples=self.validation_samples
        )

    def advance(self, report: StepReport) -> None:
        """Count one iteration."""
        self.iteration += 1
        self.skipped_iterations = self.skipped_iterations + report.skipped
        self.tokens += report.tokens
        self.samples += self.samples_per_iteration

    def take_validation_samples(self, count: int) -> int:
        """Give the next `count` validation samples to an evaluation; returns the first of them."""
        first = self.validation_samples
        self.validation_samples += count
        return first

    def request_stop(self, reason: str, *, is_hurried: bool = False) -> None:
        """End the loop after this iteration; every rank must ask for it at the same one."""
        self.stop_reason = self.stop_reason or reason
        self.is_hurried = self.is_hurried or is_hurried

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must hold."""
        return {
            "iteration": self.iteration,
            "skipped_iterations": int(self.skipped_iterations),
            "tokens": self.tokens,
            "samples": self.samples,
            "validation_samples": self.validation_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.iteration = int(state["iteration"])
        self.skipped_iterations = int(state["skipped_iterations"])
        self.tokens = int(state["tokens"])
        self.samples = int(state["samples"])
        self.validation_samples = int(state["validation_samples"])
