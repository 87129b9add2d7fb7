"""Time all collective operations of a training, ours and the engine's, and log a table of them."""

import logging
from contextlib import ExitStack

from neox_model.metrics.collective_times import CollectiveTimes
from neox_model.torch_compat import watched_collectives
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["CollectivesHook"]

logger = logging.getLogger(__name__)


class CollectivesHook(Hook):
    """Times the operations between the start and the end of the loop.

    It must be the last hook, so that the table at the end includes the last evaluation and the last save.
    After an error it logs the table, too.

    Args:
        times: receives the operations.
        interval: iterations between tables; None: only at the end.
        rank: this process's rank; rank 0 logs its own operations.
    """

    def __init__(self, times: CollectiveTimes, *, interval: int | None, rank: int) -> None:
        self._times = times
        self._interval = interval
        self._rank = rank
        self._watching = ExitStack()
        self._is_watching = False

    def on_start(self, state: TrainState) -> None:
        """Start to time."""
        self._watching.enter_context(watched_collectives(self._times.watch))
        self._is_watching = True

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Log the table once per interval."""
        if self._interval is not None and state.iteration % self._interval == 0:
            self._log(f"to iteration {state.iteration}")

    def on_end(self, state: TrainState) -> None:
        """Log the table, and stop."""
        self._stop("in all")

    def close(self) -> None:
        """Log the table and stop, unless the training has ended without an error."""
        self._stop("until the error")

    def _stop(self, when: str) -> None:
        if self._is_watching:
            self._is_watching = False
            self._watching.close()
            self._log(when)

    def _log(self, when: str) -> None:
        if self._rank == 0:
            logger.info("collective operations of rank 0 %s:\n%s", when, self._times.table())
