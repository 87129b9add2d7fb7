"""Report this worker's progress to its agent, for the detection of hangs."""

from neox_launcher.worker.reporting import ALL_DONE, Progress
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["ProgressHook"]


class ProgressHook(Hook):
    """Reports each iteration. Must precede slow hooks, so that they do not count as the step's time.

    Args:
        progress: reports to this worker's agent.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Report one finished iteration."""
        self._progress.report(state.iteration)

    def on_end(self, state: TrainState) -> None:
        """Report the end: the last evaluation and the last save have no time limit."""
        self._progress.report(ALL_DONE)
