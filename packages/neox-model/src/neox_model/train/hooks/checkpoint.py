"""Saves checkpoints: every `save_interval` iterations, and after the last iteration."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from neox_launcher.errors import NeoXError
from neox_model.checkpoint.errors import CheckpointError
from neox_model.metrics.timers import Timers
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["CheckpointHook"]

logger = logging.getLogger(__name__)


class CheckpointHook(Hook):
    """Decides when to save, and what a failure means.

    A scheduled save that fails is an error in the log, and the next one is tried as planned: a full disk
    must not end a long training. A failing last save is the training's failure.

    Args:
        save: saves the state; collective, and fails on all ranks or on none.
        interval: iterations between saves; None: only at the end.
        timers: saving is measured as the activity `checkpoint`.
        before_save: called before each save, for those who want their own record to be no older than the
            checkpoint.
        while_saving: gives, for an iteration, what surrounds its save.
    """

    def __init__(
        self,
        save: Callable[[TrainState], object],
        *,
        interval: int | None,
        timers: Timers,
        before_save: Callable[[], None],
        while_saving: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._save = save
        self._interval = interval
        self._timers = timers
        self._before_save = before_save
        self._while_saving = while_saving

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Save when it is time, and after the last iteration of this process.

        Raises:
            NeoXError: the last iteration cannot be saved.
        """
        if state.finished:
            try:
                self._save_now(state)
            except CheckpointError as error:
                raise NeoXError(
                    f"the training's last iteration, {state.iteration}, could not be saved: {error}"
                ) from error
        elif self._interval and state.iteration % self._interval == 0:
            try:
                self._save_now(state)
            except CheckpointError as error:
                logger.error("iteration %d is not saved, training goes on: %s", state.iteration, error)

    def _save_now(self, state: TrainState) -> None:
        self._before_save()
        with self._timers.measure("checkpoint"), self._while_saving(state.iteration):
            self._save(state)
