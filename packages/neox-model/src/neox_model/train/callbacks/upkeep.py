"""Garbage collection, in the same iteration on all ranks."""

import gc
from typing import Self

from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["GarbageCollection"]


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
