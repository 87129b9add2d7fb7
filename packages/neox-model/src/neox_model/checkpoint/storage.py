"""Which ranks share a folder of checkpoints, all or those of one host, and which training saves there.

Two runs that save to a folder would delete each other's unfinished checkpoints.
"""

import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_launcher.protocol.claims import SAVES_TO, folder_in_use, lock_of, name_holder
from neox_launcher.worker.ranks import read_rank
from neox_model.checkpoint.errors import CheckpointError, FolderInUseError
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Group, Groups

__all__ = ["Storage", "find_storage", "folder_lock", "refuse_shared_folder", "save_lock"]

_MARK = ".host-"
_POLL_SECONDS = 0.2
# Long enough for a second try: a launcher locks the file for an instant to see whether the folder is free.
_LEAST_PATIENCE_SECONDS = 0.3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Storage:
    """The folders of checkpoints of a job.

    Args:
        names: by rank, the host whose disk its folder is on; the same for all if they share one folder.
        rank: this process's.
        is_local: each host has a folder of its own, with the shards of its ranks and a copy of the manifest.
    """

    names: tuple[str, ...]
    rank: int
    is_local: bool

    @staticmethod
    def shared(groups: Groups) -> "Storage":
        """Return one folder for all ranks."""
        return Storage(("",) * groups.world.size, groups.world.rank, is_local=False)

    @property
    def name(self) -> str:
        """Return the host of this rank's folder."""
        return self.names[self.rank]

    @property
    def leaders(self) -> list[int]:
        """Return the first rank of each folder, which creates, renames and deletes files for all of them."""
        return [self.names.index(name) for name in dict.fromkeys(self.names)]

    @property
    def leads(self) -> bool:
        """Return whether this rank is the first of its folder."""
        return self.rank in self.leaders

    @property
    def ranks_here(self) -> list[int]:
        """Return the ranks that share this rank's folder."""
        return [rank for rank, name in enumerate(self.names) if name == self.name]


def find_storage(section: CheckpointSection, groups: Groups) -> Storage:
    """Return where a configured job has its checkpoints. Collective over all ranks.

    Raises:
        CheckpointError: several hosts have the same name.
    """
    if not section.checkpoint.use_node_local_storage:
        return Storage.shared(groups)
    me = read_rank()
    places = all_gather_object(
        groups.control, (socket.gethostname(), groups.world.rank if me is None else me.local_rank)
    )
    names = tuple(name for name, _ in places)
    if len(set(places)) < len(places):
        repeated = next(name for name in names if places.count((name, 0)) > 1)
        raise CheckpointError(
            f"several hosts are named {repeated}, but checkpoint.use_node_local_storage requires that their "
            "names differ; change them, or set use_node_local_storage: false"
        )
    return Storage(names, groups.world.rank, is_local=True)


@contextmanager
def _refusing_other_folders() -> Iterator[None]:
    """Name the remedy if the block cannot create a folder of checkpoints, or a file in it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error}; set save to a folder that this user can create and write") from error


def refuse_shared_folder(directory: Path, storage: Storage, control: Group) -> None:
    """Refuse a folder that several hosts see, where each host must have its own. Collective.

    Raises:
        CheckpointError: it is shared, or cannot be written; the same on all ranks.
    """
    mark = directory / f"{_MARK}{storage.rank}-{secrets.token_hex(4)}"
    action = f"preparing to save to {directory} on each host"
    with ExitStack() as marked:
        with shared_outcome(control, action):
            if storage.leads:
                with _refusing_other_folders():
                    directory.mkdir(parents=True, exist_ok=True)
                    mark.touch()
                marked.callback(mark.unlink, missing_ok=True)
        written = all_gather_object(control, mark.name)
        with shared_outcome(control, action):
            if storage.leads:
                # Also marks of earlier starts that were killed here.
                for path in directory.glob(f"{_MARK}*"):
                    if path.name not in written:
                        path.unlink(missing_ok=True)
            others = [name for name in written if name != mark.name and (directory / name).exists()]
            if storage.leads and others:
                raise CheckpointError(
                    "it is the same folder on several hosts, but checkpoint.use_node_local_storage requires "
                    "one of its own on each; set save to a local folder, or use_node_local_storage: false"
                )


@contextmanager
def save_lock(
    directory: Path, groups: Groups, *, storage: Storage | None = None, patience: float = 0.0
) -> Iterator[None]:
    """Prevent other runs from saving to this folder, which is created if missing. Collective.

    One rank per folder holds a lock that the kernel releases when the process ends.

    Args:
        directory: folder of the checkpoints.
        groups: this rank's process groups.
        storage: the folders of checkpoints; None: all ranks share one.
        patience: seconds to wait for another run to end.

    Raises:
        FolderInUseError: another run saves there; the same on all ranks.
        CheckpointError: the folder cannot be created; the same on all ranks.
    """
    storage = storage or Storage.shared(groups)
    if len(storage.leaders) > 1:
        refuse_shared_folder(directory, storage, groups.control)
    with ExitStack() as held:
        with shared_outcome(groups.control, f"preparing to save to {directory}"):
            if storage.leads:
                with _refusing_other_folders():
                    held.enter_context(folder_lock(directory, patience=patience, use=SAVES_TO))
        yield


@contextmanager
def folder_lock(directory: Path, *, patience: float, use: str) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing.

    Args:
        directory: the folder.
        patience: seconds to wait for another run.
        use: what a run that holds the lock does with the folder, for messages.

    Raises:
        FolderInUseError: another run holds it.
        OSError: the folder or the file of the lock cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Without kernel locks, filelock would fall back to a file that a killed run leaves locked.
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
            "cannot lock %s (%s): make sure that no other run %s it", directory, error.strerror, use
        )
    try:
        name_holder(directory)
        yield
    finally:
        lock.release()
