"""Allow only one training to save to a folder: two would delete each other's unfinished checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from neox_launcher.protocol.claims import SAVES_TO, folder_in_use, lock_of, name_holder
from neox_model.checkpoint.errors import FolderInUseError
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.storage import Storage, refuse_shared_folder, refusing_other_folders
from neox_model.parallel.groups import Groups

__all__ = ["folder_lock", "save_lock"]

_POLL_SECONDS = 0.2
# Long enough for a second try: a launcher locks the file for an instant to see whether the folder is free.
_LEAST_PATIENCE_SECONDS = 0.3

logger = logging.getLogger(__name__)


@contextmanager
def save_lock(
    directory: Path, groups: Groups, *, storage: Storage | None = None, patience: float = 0.0
) -> Iterator[None]:
    """Prevent other trainings from saving to this folder, which is created if missing. Collective.

    One rank per folder holds a lock that the kernel releases when the process ends.

    Args:
        directory: folder of the checkpoints.
        groups: this rank's process groups.
        storage: the folders of checkpoints; None: all ranks share one.
        patience: seconds to wait for another training to end.

    Raises:
        FolderInUseError: another training saves there; the same on all ranks.
        CheckpointError: the folder cannot be created; the same on all ranks.
    """
    storage = storage or Storage.shared(groups)
    if len(storage.leaders) > 1:
        refuse_shared_folder(directory, storage, groups.control)
    with ExitStack() as held:
        with shared_outcome(groups.control, f"preparing to save to {directory}"):
            if storage.leads:
                with refusing_other_folders():
                    held.enter_context(folder_lock(directory, patience=patience, use=SAVES_TO))
        yield


@contextmanager
def folder_lock(directory: Path, *, patience: float, use: str) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing.

    Args:
        directory: the folder.
        patience: seconds to wait for another training.
        use: what a training that holds the lock does with the folder, for messages.

    Raises:
        FolderInUseError: another training holds it.
        OSError: the folder or the file of the lock cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Without kernel locks, filelock would fall back to a file that a killed training leaves locked.
    lock = FileLock(lock_of(directory), poll_interval=_POLL_SECONDS, fallback_to_soft=False)
    try:
        lock.acquire(timeout=max(patience, _LEAST_PATIENCE_SECONDS))
    except Timeout as error:
        raise FolderInUseError(folder_in_use(directory, use)) from error
    except OSError as error:
        if error.filename is not None:  # Opening the file failed; an error of locking names no file.
            raise
        # Some network file systems have no locks.
        logger.warning(
            "cannot lock %s (%s): make sure that no other training %s it", directory, error.strerror, use
        )
    try:
        name_holder(directory)
        yield
    finally:
        lock.release()
