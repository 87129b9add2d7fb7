"""The interface of training hooks."""

from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["Hook"]


class Hook:
    """Base class of callbacks of the training loop; methods do nothing unless overridden.

    All ranks have the same hooks in the same order, so a hook may communicate.
    """

    def on_start(self, state: TrainState) -> None:
        """Run before the first iteration of this process."""

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Run after every iteration, which `state` already counts."""

    def on_pause(self, state: TrainState) -> None:
        """Undo what the hook changed in this process, such as signal handlers.

        Called after `on_end` of all hooks, when a program leaves the loop after an iteration and may continue
        it later, and when it continues itself after an error. May be called twice.
        """

    def on_resume(self, state: TrainState) -> None:
        """Run before the next iteration after `on_pause`."""

    def on_end(self, state: TrainState) -> None:
        """Run after the last iteration of this process; not called after an error."""
