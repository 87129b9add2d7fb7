"""Log that a training ends between two averages of its replicas' weights."""

import logging
from typing import Any

from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState

__all__ = ["LocalStepsHook"]

logger = logging.getLogger(__name__)

# Not for a training that was stopped: another iteration ends it.
_REMEDY = (
    "; to end with an average, set train-iters to a multiple of the interval between averages, or "
    "local_step_clipper: 1"
)


class LocalStepsHook(Hook):
    """States at the end which weights were saved and evaluated, if each replica has its own.

    Args:
        optimizer: one with `replicas_differ`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def on_end(self, state: TrainState) -> None:
        """Log a warning if replicas have made updates alone since their last average."""
        if self._optimizer.replicas_differ:
            logger.warning(
                "the training ends in iteration %d between two averages of %s: its checkpoint, evaluation "
                "and export have, as the model, the weights of the last average, without the updates that "
                "each replica has made alone since; a training that resumes from the checkpoint continues "
                "with these%s",
                state.iteration,
                type(self._optimizer).__name__,
                _REMEDY if state.stop_reason is None else "",
            )
