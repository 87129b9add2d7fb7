"""Tells this worker's node how far it is: where nobody tells anything for long, the job hangs."""

from neox_launcher.worker import ALL_DONE, Progress
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["ProgressHook"]


class ProgressHook(Hook):
    """Comes before the hooks that take long: they are not counted as the step's time.

    Args:
        progress: of this worker.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """One more is done."""
        self._progress.tell(state.iteration)

    def on_end(self, state: TrainState) -> None:
        """The last evaluation and the last save may take as long as they need."""
        self._progress.tell(ALL_DONE)
