"""Save checkpoints, also in the background, and upload them."""

import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Self

from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import checkpoint_name
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.uploads import Uploads
from neox_model.parallel.delayed_exchange import DelayedExchange
from neox_model.parallel.groups import Group
from neox_model.train.callbacks.progress import while_saving
from neox_model.train.loading import has_start
from neox_model.train.run import Callback, Run
from neox_model.train.saving import save_run
from neox_model.train.state import StepReport

__all__ = ["CheckpointCallback", "SaveClock", "UploadCallback"]

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


class CheckpointCallback(Callback):
    """Saves checkpoints and handles failures to save.

    A failure of a scheduled save is logged as an error and the run continues, so that a full disk does not
    end a long run. A failure of the last save, which always is synchronous, ends the run with an error.

    Args:
        folder: receives the checkpoints.
        interval: iterations between saves; None without `growth`: save only at the end.
        growth: save at iterations 1, growth, growth^2, ..., rounded down.
        extra: iterations at which to save in addition; 0 saves before the first one.
        clock: requests further saves by time; None: none.
        background: makes scheduled saves in the background; None: they are synchronous.
        saves_optimizer: checkpoints contain the optimizer's states.
        save: saves the run in a folder, with the arguments of `save_run`; fails on all ranks or on none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        interval: int | None,
        growth: float | None = None,
        extra: Collection[int] = (),
        clock: SaveClock | None = None,
        background: BackgroundSaves | None = None,
        saves_optimizer: bool = True,
        save: Callable[..., object] = save_run,
    ) -> None:
        self._folder, self._save = folder, save
        self._interval, self._growth, self._extra = interval, growth, frozenset(extra)
        self._clock = clock
        self._background, self._saves_optimizer = background, saves_optimizer
        self._is_prepared = background is None
        self._began = 0.0
        # Iteration of the save begun last, and of the last complete one, with the evaluation that was due.
        self._begun: tuple[int, int | None] | None = None
        self._saved: tuple[int, int | None] | None = None

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `save` is set."""
        section = run.config.checkpoint
        if section.save is None:
            return None
        background, minutes = None, section.save_interval_minutes
        if section.async_save:
            patience = run.config.launch.hang_timeout
            background = BackgroundSaves(run.groups, run.engine.device, patience=patience)
        return cls(
            Path(section.save),
            interval=section.save_interval,
            growth=section.save_growth,
            extra=section.extra_save_iters or (),
            clock=None if minutes is None else SaveClock(run.groups.control, minutes=minutes),
            background=background,
            saves_optimizer=not section.no_save_optim,
        )

    def on_start(self) -> None:
        """Save the state before the first iteration if `extra` contains 0; start the clock."""
        if self.run.state.finished:
            return
        is_saved = has_start(self.run.config.checkpoint, self.run.resumes)
        if self.run.state.iteration == 0 and 0 in self._extra and not is_saved:
            self._try_to_save()
        if self._clock is not None:
            self._clock.restart()
            self._clock.send()

    def on_step(self, report: StepReport) -> None:
        """Save if it is due, and after the last iteration of this process.

        Raises:
            NeoXError: the last iteration cannot be saved.
        """
        is_time = self._clock is not None and self._clock.receive()
        if self.run.state.finished:
            self.save_last()
            return
        if self._background is not None and not self._is_prepared:
            self._is_prepared = True
            try:
                self._background.prepare(self.run, save_optimizer=self._saves_optimizer)
            except (NeoXError, OSError, RuntimeError) as error:
                # The save meets the same error, and reports it on all ranks.
                logger.warning("cannot prepare asynchronous saves: %s", error)
        if is_time or self._is_due(self.run.state.iteration):
            self._try_to_save()
            if self._clock is not None:
                self._clock.restart()
        elif self._background is not None:
            self._continue(self._background, self._background.proceed)
        if self._clock is not None:
            self._clock.send()

    def settle(self) -> None:
        """Wait for the save under way, if there is one, whose failure is logged. Collective.

        A state that was good is thereby kept.
        """
        if self._background is None or self._background.iteration is None:
            return
        with _watched(self.run):
            self._continue(self._background, self._background.finish)

    def close(self) -> None:
        """Give up the save under way."""
        if self._background is not None:
            self._background.close()

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

    def save_last(self) -> None:
        """Save a state from which no further iteration follows, unless it is saved already.

        Raises:
            NeoXError: it cannot be saved.
        """
        self.settle()
        state = self.run.state
        if self._saved == (state.iteration, state.due_validation):
            return
        try:
            self._save_now(None)
        except CheckpointError as error:
            self.run.events.record("save_failed", state.iteration, message=str(error))
            remedy = _remedy(error) or "remove the cause"
            raise NeoXError(
                f"cannot save the last iteration, {state.iteration}: {error}; {remedy}, then start again "
                "from the latest checkpoint"
            ) from error

    def _try_to_save(self) -> None:
        try:
            self._save_now(self._background)
        except CheckpointError as error:
            _report_failure(self.run, self.run.state.iteration, error)

    def _save_now(self, background: BackgroundSaves | None) -> None:
        # First of all: `before_save` may refuse this state, or end the run.
        self.settle()
        self.run.before_save()
        with _watched(self.run):
            if self._background is not None:
                self._background.settle()
            self._began, self._begun = (
                time.monotonic(),
                (self.run.state.iteration, self.run.state.due_validation),
            )
            if background is None:
                self._save(self.run, self._folder)
            else:
                self._save(self.run, self._folder, save=background.start)
        if background is None:
            self._record_saved(self.run.state.iteration)

    def _continue(self, saves: BackgroundSaves, action: Callable[[], None]) -> None:
        """Continue with the save under way, whose failure does not end the run."""
        iteration = saves.iteration
        try:
            action()
        except CheckpointError as error:
            assert iteration is not None, "a failure is that of a save"
            _report_failure(self.run, iteration, error)
        else:
            if iteration is not None and saves.iteration is None:
                self._record_saved(iteration)

    def _record_saved(self, iteration: int) -> None:
        self._saved = self._begun
        self.run.events.record("save", iteration, seconds=round(time.monotonic() - self._began, 3))
        self.run.after_save(iteration)


@contextmanager
def _watched(run: Run) -> Iterator[None]:
    iteration = run.state.iteration
    # A report would be taken for the first iteration, which has its own time limit.
    watched = while_saving(run.progress, iteration) if iteration else nullcontext()
    with run.timers.measure("checkpoint"), watched:
        yield


def _report_failure(run: Run, iteration: int, error: CheckpointError) -> None:
    run.events.record("save_failed", iteration, message=str(error))
    remedy = _remedy(error)
    what = f"{error}; {remedy}" if remedy else str(error)
    logger.error("iteration %d was not saved, training continues: %s", iteration, what)


def _remedy(error: CheckpointError) -> str:
    """Return what to do about a full disk, possibly that of another rank, known by its text; else nothing."""
    if any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT)):
        return "free disk space"
    return ""


class UploadCallback(Callback):
    """Reports uploads that have ended, starts those that wait, and waits for the last one at the end.

    `checkpoint/uploads.py` uploads saved checkpoints to an object store. A failed upload is logged as an
    error and the run continues; the next checkpoint is uploaded as usual. A failed upload of the last one
    ends the run with an error. It runs only on rank 0, after all callbacks that communicate.

    Args:
        uploads: uploads the checkpoints.
        folder: has the checkpoints.
    """

    def __init__(self, uploads: Uploads, folder: Path) -> None:
        self._uploads, self._folder = uploads, folder

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it on rank 0 if an object store is configured."""
        return None if run.uploads is None else cls(run.uploads, Path(run.config.checkpoint.save or ""))

    def on_start(self) -> None:
        """Upload the checkpoint in `save` that this run resumes from, unless the store has it.

        Its upload may have failed, or been ended with the last attempt.
        """
        section = self.run.config.checkpoint
        if has_start(section, self.run.resumes) and (resumed := find_latest(Path(section.load or ""))):
            self._uploads.submit(resumed)

    def on_step(self, report: StepReport) -> None:
        """Report and start uploads."""
        self._uploads.poll()

    def after_save(self, iteration: int) -> None:
        """Upload the checkpoint."""
        self._uploads.submit((self._folder / checkpoint_name(iteration)).absolute())

    def on_end(self) -> None:
        """Wait for the last upload.

        Raises:
            NeoXError: it failed.
        """
        with self.run.progress.repeated(self.run.state.iteration):
            try:
                self._uploads.finish()
            except CheckpointError as error:
                raise NeoXError(str(error)) from error

    def close(self) -> None:
        """End the upload under way."""
        self._uploads.close()
