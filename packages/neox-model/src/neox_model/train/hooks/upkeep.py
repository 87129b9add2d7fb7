"""Small actions around iterations: garbage collection, the number of kept tokens, weights of replicas."""

import gc
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from neox_model.extras.token_dropping.layer import token_dropping_layers
from neox_model.train.hooks.base import Hook
from neox_model.train.state import StepReport, TrainState

__all__ = ["DropTokensHook", "GarbageCollectionHook", "LocalStepsHook"]

logger = logging.getLogger(__name__)


class GarbageCollectionHook(Hook):
    """Replaces Python's automatic garbage collection, so that all ranks collect in the same iteration.

    Automatic collection runs at a different time on each rank, and all other ranks wait for it. Objects that
    exist when the training starts are frozen and not examined again.

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
        self.on_resume(state)

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
        self._was_enabled = gc.isenabled()
        gc.disable()


class DropTokensHook(Hook):
    """Sets `kept_tokens` of this rank's token-dropping layers before each iteration.

    The number depends on the iteration only, so that a resumed training continues where it was.

    Args:
        model: the model with the token-dropping layers.
        kept: function of the iteration, counted from 0, that returns the number of tokens to keep.
    """

    def __init__(self, model: nn.Module, kept: Callable[[int], int]) -> None:
        self._layers = token_dropping_layers(model)
        self._kept = kept

    def on_start(self, state: TrainState) -> None:
        """Set the number for the next iteration of this process."""
        for layer in self._layers:
            layer.kept_tokens = self._kept(state.iteration)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Set the number for the next iteration."""
        self.on_start(state)


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
            # Not for a training that was stopped: another iteration ends it.
            remedy = (
                "; to end with an average, set train-iters to a multiple of the interval between averages, "
                "or local_step_clipper: 1"
            )
            logger.warning(
                "the training ends in iteration %d between two averages of %s: its checkpoint, evaluation "
                "and export have, as the model, the weights of the last average, without the updates that "
                "each replica has made alone since; a training that resumes from the checkpoint continues "
                "with these%s",
                state.iteration,
                type(self._optimizer).__name__,
                remedy if state.stop_reason is None else "",
            )
