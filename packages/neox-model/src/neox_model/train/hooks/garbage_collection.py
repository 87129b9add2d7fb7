"""Runs Python's garbage collector on all ranks in the same iteration.

Left alone, it runs on each rank at another moment and all others wait for that rank: at a thousand ranks
somebody is always collecting. What exists when the training starts is never looked at again.
"""

import gc

from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["GarbageCollectionHook"]


class GarbageCollectionHook(Hook):
    """Takes over from the automatic collector.

    Args:
        interval: iterations between collections.
    """

    def __init__(self, interval: int = 500) -> None:
        self._interval = interval

    def on_start(self, state: TrainState) -> None:
        """Switch the automatic collector off."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Collect when it is time."""
        if state.iteration % self._interval == 0:
            gc.collect()

    def on_end(self, state: TrainState) -> None:
        """Switch the automatic collector on again."""
        gc.unfreeze()
        gc.enable()
