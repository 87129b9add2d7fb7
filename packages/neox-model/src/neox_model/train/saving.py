"""Save checkpoints: the hooks that save and upload, saves in the background, and the lock of the folder."""

import errno
import logging
import os
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import checkpoint_name
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_launcher.worker.reporting import is_restart
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.save import save_checkpoint
from neox_model.checkpoint.storage import Storage, save_lock
from neox_model.checkpoint.store_claim import claim_store
from neox_model.checkpoint.uploads import Uploads
from neox_model.metrics.events import NO_EVENTS, Events
from neox_model.metrics.timers import Timers
from neox_model.parallel.delayed_exchange import DelayedExchange
from neox_model.parallel.groups import Group, Groups
from neox_model.train.hooks.base import Hook
from neox_model.train.hooks.progress import while_saving
from neox_model.train.state import StepReport, TrainState
from neox_model.train.training import Outputs, Training

__all__ = [
    "Background",
    "CheckpointHook",
    "SaveClock",
    "UploadHook",
    "build_background_saves",
    "build_checkpoint_hook",
    "build_uploads",
    "check_saves",
    "claim_folder",
    "save_training",
]

logger = logging.getLogger(__name__)


class SaveClock:
    """Requests a save when enough time has passed since the last one, by the clock of rank 0.

    Rank 0 sends its decision to all ranks while the next iteration runs, so that no rank waits for it.

    Args:
        control: CPU group of all ranks.
        minutes: time between two saves.
        now: clock in seconds; only that of rank 0 counts.
    """

    def __init__(self, control: Group, *, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._is_first = control.rank == 0
        self._decision = DelayedExchange(control, "max")
        self._seconds = minutes * 60.0
        self._now = now
        self._since = now()

    def restart(self) -> None:
        """Count the time from now on, after a save."""
        self._since = self._now()

    def send(self) -> None:
        """Start sending rank 0's decision. Collective over the control group."""
        is_due = self._is_first and self._now() - self._since >= self._seconds
        self._decision.send(int(is_due))

    def receive(self) -> bool:
        """Return the decision that was sent last, once; False if none was."""
        return bool(self._decision.receive())


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
    ) -> None:
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
            self._is_prepared = True
            try:
                self._background.prepare()
            except (NeoXError, OSError, RuntimeError) as error:
                # The save meets the same error, and reports it on all ranks.
                logger.warning("cannot prepare asynchronous saves: %s", error)
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

    def _watched(self, state: TrainState) -> AbstractContextManager[object]:
        # A report would be taken for the first iteration, which has its own time limit.
        return self._while_saving(state.iteration) if state.iteration else nullcontext()

    def _is_due(self, iteration: int) -> bool:
        """Return True for extra iterations, multiples of the interval, and powers of the growth.

        Powers are rounded down, as by GPT-NeoX's checkpoint-scale `log`, which also multiplies without
        rounding in between.
        """
        if iteration in self._extra or (self._interval is not None and iteration % self._interval == 0):
            return True
        if self._growth is None:
            return False
        power: float = 1
        while int(power) < iteration:
            power *= self._growth
        return int(power) == iteration

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
            remedy = _remedy(error) or "remove the cause"
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
        remedy = _remedy(error)
        what = f"{error}; {remedy}" if remedy else str(error)
        logger.error("iteration %d was not saved, training continues: %s", iteration, what)


def _remedy(error: CheckpointError) -> str:
    """Return what to do about a full disk, possibly that of another rank, known by its text; else nothing."""
    if any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT)):
        return "free disk space"
    return ""


class UploadHook(Hook):
    """Reports uploads that have ended, starts those that wait, and waits for the last one at the end.

    `checkpoint/uploads.py` uploads saved checkpoints to an object store. A failed upload is logged as an
    error and training continues; the next checkpoint is uploaded as usual. A failed upload of the last one
    ends the training with an error. It runs on rank 0 alone, after all hooks that communicate.

    Args:
        uploads: uploads the checkpoints.
        resumed: the checkpoint that this training resumed from, if it is in `save`: its upload may have
            failed, or been ended with the last attempt.
        while_waiting: function of the iteration that returns a context manager around the wait.
    """

    def __init__(
        self,
        uploads: Uploads,
        *,
        resumed: Path | None,
        while_waiting: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._uploads = uploads
        self._resumed = resumed
        self._while_waiting = while_waiting

    def on_start(self, state: TrainState) -> None:
        """Upload the checkpoint that this training resumed from, unless the store has it."""
        if self._resumed is not None:
            self._uploads.submit(self._resumed)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Report and start uploads."""
        self._uploads.poll()

    def on_end(self, state: TrainState) -> None:
        """Wait for the last upload.

        Raises:
            NeoXError: it failed.
        """
        with self._while_waiting(state.iteration):
            try:
                self._uploads.finish()
            except CheckpointError as error:
                raise NeoXError(str(error)) from error


def claim_folder(folder: str | None, groups: Groups, storage: Storage) -> AbstractContextManager[None]:
    """Lock the folder of checkpoints against other trainings, as a context manager. Collective."""
    # A host that lost its connection in the last attempt may keep running, and hold the lock, for that long.
    patience = 120.0 if is_restart() else 0.0
    if folder is None:
        return nullcontext()
    return save_lock(Path(folder), groups, storage=storage, patience=patience)


def check_saves(section: CheckpointSection) -> None:
    """Check that the configured saves are possible on this operating system.

    Raises:
        NeoXError: it has no files in memory, which asynchronous saves need.
    """
    if section.save is not None and section.async_save and not hasattr(os, "memfd_create"):
        raise NeoXError("async-save requires Linux; set async-save: false")


def save_training(
    training: Training, directory: Path, *, save: Callable[..., object] = save_checkpoint
) -> None:
    """Save the training by `save_checkpoint`, or by a function with the same arguments."""
    section = training.config.checkpoint
    save(
        directory,
        training,
        iteration=training.state.iteration,
        config=training.recorded(training.state.position),
        save_optimizer=not section.no_save_optim,
        save_rng=not section.no_save_rng,
        keep_last=section.keep_last_n_checkpoints,
    )


def build_background_saves(
    section: CheckpointSection, groups: Groups, device: torch.device, *, patience: float | None
) -> BackgroundSaves | None:
    """Build saves in the background, if they are configured."""
    if section.save is None or not section.async_save:
        return None
    return BackgroundSaves(groups, device, patience=patience)


def build_checkpoint_hook(
    training: Training,
    directory: Path,
    extra: Collection[int],
    timers: Timers,
    before_save: Callable[[], None],
    outputs: Outputs,
    saves: BackgroundSaves | None,
    *,
    saved: Callable[[int], None] | None = None,
) -> CheckpointHook:
    """Build the hook that saves.

    Args:
        training: the parts of the training.
        directory: folder of the checkpoints.
        extra: further iterations at which to save.
        timers: measures saving.
        before_save: called before each save.
        outputs: where saves are reported.
        saves: saves in the background; None: all are synchronous.
        saved: called with the iteration of each complete checkpoint, on every rank.
    """
    section = training.config.checkpoint
    minutes, background, uploads = section.save_interval_minutes, None, training.uploads

    def after_save(iteration: int) -> None:
        if saved is not None:
            saved(iteration)
        if uploads is not None:
            uploads.submit((directory / checkpoint_name(iteration)).absolute())

    if saves is not None:
        background = Background(
            start=lambda state: save_training(training, directory, save=saves.start),
            saves=saves,
            prepare=partial(saves.prepare, training, save_optimizer=not section.no_save_optim),
        )
    return CheckpointHook(
        lambda state: save_training(training, directory),
        interval=section.save_interval,
        growth=section.save_growth,
        extra=extra,
        clock=None if minutes is None else SaveClock(training.groups.control, minutes=minutes),
        background=background,
        timers=timers,
        before_save=before_save,
        while_saving=partial(while_saving, outputs.progress),
        events=outputs.events,
        after_save=after_save,
    )


def build_uploads(section: CheckpointSection, groups: Groups) -> Uploads | None:
    """Build the uploads to an object store, on rank 0, if they are configured. Collective over all ranks.

    Raises:
        CheckpointError: the store cannot be written to, or contains checkpoints of another training; the same
            on all ranks.
    """
    if section.save is None or section.checkpoint_store is None:
        return None
    save, url = Path(section.save).absolute(), section.checkpoint_store
    with shared_outcome(groups.control, "starting uploads"):
        if groups.world.rank == 0:
            owner = claim_store(url, save, load=None if section.finetune else section.load)
    if groups.world.rank != 0:
        return None
    return Uploads(save, url, owner=owner, chunk_bytes=section.store_chunk_size)
