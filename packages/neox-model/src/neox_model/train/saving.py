"""Build what saves checkpoints: the hook, saves in the background, uploads, and the lock of the folder."""

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import checkpoint_name
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_launcher.worker.reporting import is_restart
from neox_model.checkpoint.background import BackgroundSaves
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.save import save_checkpoint
from neox_model.checkpoint.save_lock import save_lock
from neox_model.checkpoint.storage import Storage
from neox_model.checkpoint.store_claim import claim_store
from neox_model.checkpoint.uploads import Uploads
from neox_model.metrics.timers import Timers
from neox_model.parallel.groups import Groups
from neox_model.train.hooks.checkpoint import Background, CheckpointHook, SaveClock
from neox_model.train.hooks.progress import while_saving
from neox_model.train.training import Outputs, Training

__all__ = [
    "build_background_saves",
    "build_checkpoint_hook",
    "build_uploads",
    "check_saves",
    "claim_folder",
    "save_training",
]

# A host that lost its connection in the last attempt may keep running, and hold the lock, for this long.
_RESTART_PATIENCE_SECONDS = 120.0


def claim_folder(folder: str | None, groups: Groups, storage: Storage) -> AbstractContextManager[None]:
    """Lock the folder of checkpoints against other trainings, as a context manager. Collective."""
    patience = _RESTART_PATIENCE_SECONDS if is_restart() else 0.0
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
