"""Run Python's garbage collector on all ranks in the same iteration.

Automatic collection runs at a different time on each rank, and all other ranks wait for it. Objects that
exist when the training starts are frozen and not examined again.
"""

import gc

from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["GarbageCollectionHook"]


class GarbageCollectionHook(Hook):
    """Replaces automatic garbage collection.

    Args:
        interval: iterations between collections.
    """

    def __init__(self, interval: int = 500) -> None:
        self._interval = interval
        self._was_enabled = True

    def on_start(self, state: TrainState) -> None:
        """Disable automatic collection."""
        gc.collect()
        gc.freeze()
        self._disable()

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Collect every `interval` iterations."""
        if state.iteration % self._interval == 0:
            gc.collect()

    def on_pause(self, state: TrainState) -> None:
        """Enable automatic collection again, unless the program had disabled it."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def on_resume(self, state: TrainState) -> None:
        """Disable automatic collection."""
        self._disable()

    def _disable(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
