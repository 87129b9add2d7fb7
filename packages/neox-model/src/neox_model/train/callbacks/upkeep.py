"""Small actions around iterations: garbage collection, weights of replicas."""

import gc
import logging
from typing import Any, Self

from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["GarbageCollection", "LocalSteps"]

logger = logging.getLogger(__name__)


class GarbageCollection(Callback):
    """Replaces Python's automatic garbage collection, so that all ranks collect in the same iteration.

    Automatic collection runs at a different time on each rank, and all other ranks wait for it. Objects that
    exist when the run starts are frozen and not examined again.

    Args:
        interval: iterations between collections.
    """

    def __init__(self, interval: int = 500) -> None:
        self._interval = interval
        self._was_enabled = True

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Build it."""
        return cls()

    def on_start(self) -> None:
        """Disable automatic collection."""
        gc.collect()
        gc.freeze()
        self.on_resume()

    def on_step(self, report: StepReport) -> None:
        """Collect every `interval` iterations."""
        if self.run.state.iteration % self._interval == 0:
            gc.collect()

    def on_pause(self) -> None:
        """Enable automatic collection again, unless the program had disabled it."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def on_resume(self) -> None:
        """Disable automatic collection."""
        self._was_enabled = gc.isenabled()
        gc.disable()


class LocalSteps(Callback):
    """States at the end which weights were saved and evaluated, if each replica has its own.

    Args:
        optimizer: one with `replicas_differ`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if replicas may have different weights."""
        optimizer = run.engine.update.optimizer
        return cls(optimizer) if hasattr(optimizer, "replicas_differ") else None

    def on_end(self) -> None:
        """Log a warning if replicas have made updates alone since their last average."""
        if self._optimizer.replicas_differ:
            # Not for a run that was stopped: another iteration ends it.
            remedy = (
                "; to end with an average, set train-iters to a multiple of the interval between averages, "
                "or local_step_clipper: 1"
            )
            logger.warning(
                "the run ends in iteration %d between two averages of %s: its checkpoint, evaluation "
                "and export have, as the model, the weights of the last average, without the updates that "
                "each replica has made alone since; a run that resumes from the checkpoint continues "
                "with these%s",
                self.run.state.iteration,
                type(self._optimizer).__name__,
                remedy if self.run.state.stop_reason is None else "",
            )
