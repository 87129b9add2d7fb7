"""Save checkpoints at the configured iterations and after the last iteration."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from neox_config.errors import NeoXError
from neox_model.checkpoint.errors import CheckpointError
from neox_model.metrics.timers import Timers
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["CheckpointHook", "is_save_due"]

logger = logging.getLogger(__name__)


def is_save_due(iteration: int, *, interval: int | None, growth: float | None) -> bool:
    """Return True for multiples of `interval`, and for powers of `growth`, rounded down.

    Source: GPT-NeoX's checkpoint-scale `linear` and `log`, which also multiplies without rounding in between.
    """
    if interval is not None and iteration % interval == 0:
        return True
    if growth is None:
        return False
    power: float = 1
    while int(power) < iteration:
        power *= growth
    return int(power) == iteration


class CheckpointHook(Hook):
    """Saves checkpoints and handles failures to save.

    A failure of a scheduled save is logged as an error and training continues, so that a full disk does not
    end a long training. A failure of the last save ends the training with an error.

    Args:
        save: saves the state; collective, and fails on all ranks or on none.
        interval: iterations between saves; None without `growth`: save only at the end.
        growth: save at iterations 1, growth, growth^2, ..., rounded down.
        timers: measures saving as the activity `checkpoint`.
        before_save: called before each save, to write pending logs first.
        while_saving: function of the iteration that returns a context manager around the save.
    """

    def __init__(
        self,
        save: Callable[[TrainState], object],
        *,
        interval: int | None,
        growth: float | None = None,
        timers: Timers,
        before_save: Callable[[], None],
        while_saving: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._save = save
        self._interval = interval
        self._growth = growth
        self._timers = timers
        self._before_save = before_save
        self._while_saving = while_saving

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Save if it is due, and after the last iteration of this process.

        Raises:
            NeoXError: the last iteration cannot be saved.
        """
        if state.finished:
            try:
                self._save_now(state)
            except CheckpointError as error:
                raise NeoXError(
                    f"cannot save the training's last iteration, {state.iteration}: {error}"
                ) from error
        elif is_save_due(state.iteration, interval=self._interval, growth=self._growth):
            try:
                self._save_now(state)
            except CheckpointError as error:
                logger.error("iteration %d was not saved, training continues: %s", state.iteration, error)

    def _save_now(self, state: TrainState) -> None:
        self._before_save()
        with self._timers.measure("checkpoint"), self._while_saving(state.iteration):
            self._save(state)
