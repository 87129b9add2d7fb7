"""Save checkpoints at the configured iterations and times, and after the last iteration."""

import errno
import logging
import os
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from neox_config.errors import NeoXError
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.errors import CheckpointError
from neox_model.metrics.events import NO_EVENTS, Events
from neox_model.metrics.timers import Timers
from neox_model.train.hooks.base import Hook
from neox_model.train.hooks.save_clock import SaveClock
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["Background", "CheckpointHook", "is_save_due"]

logger = logging.getLogger(__name__)

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


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


@dataclass(frozen=True, slots=True)
class Background:
    """Scheduled saves in the background of the training.

    Args:
        start: starts a save in `saves`; collective, and fails on all ranks or on none.
        saves: the save under way.
        prepare: reserves memory on this rank; called once, after the first iteration, when all states exist
            unless float16 overflowed. May fail on some ranks: then the first save takes longer.
    """

    start: Callable[[TrainState], object]
    saves: BackgroundSaves
    prepare: Callable[[], object]


class CheckpointHook(Hook):
    """Saves checkpoints and handles failures to save.

    A failure of a scheduled save is logged as an error and training continues, so that a full disk does not
    end a long training. A failure of the last save, which always is synchronous, ends the training with an
    error.

    Args:
        save: saves the state; collective, and fails on all ranks or on none.
        interval: iterations between saves; None without `growth`: save only at the end.
        growth: save at iterations 1, growth, growth^2, ..., rounded down.
        extra: iterations at which to save in addition; 0 saves before the first one.
        clock: requests further saves by time; None: none.
        background: scheduled saves; None: they are synchronous.
        timers: measures saving as the activity `checkpoint`.
        before_save: called before each save, to write pending logs and to check the state first; the save
            under way is complete by then.
        while_saving: function of the iteration that returns a context manager around the save.
        events: records each save and each failure to save.
        after_save: called with the iteration of each complete checkpoint.
        keep_last: number of checkpoints that are kept; None: all.
    """

    def __init__(
        self,
        save: Callable[[TrainState], object],
        *,
        interval: int | None,
        growth: float | None = None,
        extra: Collection[int] = (),
        clock: SaveClock | None = None,
        background: Background | None = None,
        timers: Timers,
        before_save: Callable[[], None],
        while_saving: Callable[[int], AbstractContextManager[object]] = nullcontext,
        events: Events = NO_EVENTS,
        after_save: Callable[[int], None] = lambda iteration: None,
        keep_last: int | None = None,
    ) -> None:
        self._keep_last = keep_last
        self._events = events
        self._after_save = after_save
        self._save = save
        self._interval = interval
        self._growth = growth
        self._extra = frozenset(extra)
        self._clock = clock
        self._background = background
        self._timers = timers
        self._before_save = before_save
        self._while_saving = while_saving
        self._is_prepared = background is None
        self._began = 0.0
        # Iteration of the save begun last, and of the last complete one, with the evaluation that was due.
        self._begun: tuple[int, int | None] | None = None
        self._saved: tuple[int, int | None] | None = None

    def on_start(self, state: TrainState) -> None:
        """Save the state before the first iteration if `extra` contains 0; start the clock."""
        if state.finished:
            return
        if state.iteration == 0 and 0 in self._extra:
            self._try_to_save(state)
        if self._clock is not None:
            self._clock.restart()
            self._clock.send()

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Save if it is due, and after the last iteration of this process.

        Raises:
            NeoXError: the last iteration cannot be saved.
        """
        is_time = self._clock is not None and self._clock.receive()
        if state.finished:
            self.save_last(state)
            return
        if self._background is not None and not self._is_prepared:
            self._prepare(self._background)
        if is_time or self._is_due(state.iteration):
            self._try_to_save(state)
            if self._clock is not None:
                self._clock.restart()
        elif self._background is not None:
            self._continue(self._background.saves, self._background.saves.proceed)
        if self._clock is not None:
            self._clock.send()

    def finish(self, state: TrainState) -> None:
        """Wait for the save under way, if there is one, whose failure is logged. Collective.

        Call it before an error that ends the training on all ranks, so that a state that was good is kept.
        """
        if self._background is None or self._background.saves.iteration is None:
            return
        with self._timers.measure("checkpoint"), self._watched(state):
            self._continue(self._background.saves, self._background.saves.finish)

    def _prepare(self, background: Background) -> None:
        self._is_prepared = True
        try:
            background.prepare()
        except (NeoXError, OSError, RuntimeError) as error:
            # The save meets the same error, and reports it on all ranks.
            logger.warning("cannot prepare asynchronous saves: %s", error)

    def _watched(self, state: TrainState) -> AbstractContextManager[object]:
        # A report would be taken for the first iteration, which has its own time limit.
        return self._while_saving(state.iteration) if state.iteration else nullcontext()

    def _is_due(self, iteration: int) -> bool:
        return iteration in self._extra or is_save_due(
            iteration, interval=self._interval, growth=self._growth
        )

    def save_last(self, state: TrainState) -> None:
        """Save a state from which no further iteration follows, unless it is saved already.

        Raises:
            NeoXError: it cannot be saved.
        """
        self.finish(state)
        if self._saved == (state.iteration, state.due_validation):
            return
        try:
            self._save_now(state, self._save)
        except CheckpointError as error:
            self._events.record("save_failed", state.iteration, message=str(error))
            remedy = _remedy(error, self._keep_last) or "remove the cause"
            raise NeoXError(
                f"cannot save the training's last iteration, {state.iteration}: {error}; {remedy}, then "
                "start again from the latest checkpoint"
            ) from error

    def _try_to_save(self, state: TrainState) -> None:
        save = self._save if self._background is None else self._background.start
        try:
            self._save_now(state, save)
        except CheckpointError as error:
            self._report_failure(state.iteration, error)

    def _save_now(self, state: TrainState, save: Callable[[TrainState], object]) -> None:
        # First of all: `before_save` may refuse this state, or end the training.
        self.finish(state)
        self._before_save()
        with self._timers.measure("checkpoint"), self._watched(state):
            if self._background is not None:
                self._background.saves.settle()
            self._began, self._begun = time.monotonic(), (state.iteration, state.due_validation)
            save(state)
        if save == self._save:
            self._record_saved(state.iteration)

    def _continue(self, saves: BackgroundSaves, action: Callable[[], None]) -> None:
        """Continue with the save under way, whose failure does not end the training."""
        iteration = saves.iteration
        try:
            action()
        except CheckpointError as error:
            assert iteration is not None, "a failure is that of a save"
            self._report_failure(iteration, error)
        else:
            if iteration is not None and saves.iteration is None:
                self._record_saved(iteration)

    def _record_saved(self, iteration: int) -> None:
        self._saved = self._begun
        self._events.record("save", iteration, seconds=round(time.monotonic() - self._began, 3))
        self._after_save(iteration)

    def _report_failure(self, iteration: int, error: CheckpointError) -> None:
        self._events.record("save_failed", iteration, message=str(error))
        remedy = _remedy(error, self._keep_last)
        what = f"{error}; {remedy}" if remedy else str(error)
        logger.error("iteration %d was not saved, training continues: %s", iteration, what)


def _remedy(error: CheckpointError, keep_last: int | None) -> str:
    """Return what to do about a full disk, possibly that of another rank, known by its text; else nothing."""
    if any(os.strerror(code) in str(error) for code in _FULL_DISK):
        if keep_last == 1:
            return "free disk space (while a checkpoint is written, the one before it is kept, too)"
        return "free disk space (keep-last-n-checkpoints limits the number of checkpoints)"
    return ""
