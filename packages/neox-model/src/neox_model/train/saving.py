"""What saving needs besides the callbacks: the lock of the folder, the uploads, one save."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from neox_config.errors import NeoXError
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_launcher.worker.reporting import is_restart
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.save import save_checkpoint
from neox_model.checkpoint.storage import Storage, save_lock
from neox_model.checkpoint.store_claim import claim_store
from neox_model.checkpoint.uploads import Uploads
from neox_model.parallel.groups import Groups
from neox_model.train.run import Run

__all__ = ["build_uploads", "check_saves", "claim_folder", "save_run"]


def claim_folder(folder: str | None, groups: Groups, storage: Storage) -> AbstractContextManager[None]:
    """Lock the folder of checkpoints against other runs, as a context manager. Collective."""
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


def save_run(run: Run, directory: Path, *, save: Callable[..., object] = save_checkpoint) -> None:
    """Save the run by `save_checkpoint`, or by a function with the same arguments."""
    section = run.config.checkpoint
    save(
        directory,
        run,
        iteration=run.state.iteration,
        config=run.recorded(run.state.position),
        save_optimizer=not section.no_save_optim,
        save_rng=not section.no_save_rng,
        keep_last=section.keep_last_n_checkpoints,
    )


def build_uploads(section: CheckpointSection, groups: Groups) -> Uploads | None:
    """Build the uploads to an object store, on rank 0, if they are configured. Collective over all ranks.

    Raises:
        CheckpointError: the store cannot be written to, or contains checkpoints of another run; the same
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
