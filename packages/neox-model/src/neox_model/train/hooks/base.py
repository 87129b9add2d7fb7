"""What a hook may do, and when."""

from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["Hook"]


class Hook:
    """A side effect of the training loop; every method does nothing until a subclass says otherwise.

    All ranks have the same hooks in the same order, so a hook may communicate.
    """

    def on_start(self, state: TrainState) -> None:
        """Before the first iteration of this process."""

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """After every iteration, already counted in `state`."""

    def on_end(self, state: TrainState) -> None:
        """After the last iteration of this process; not called when an error ends it."""
