"""One training at a time saves to a folder: two would tidy away each other's unfinished checkpoints."""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.parallel.groups import Groups

__all__ = ["claimed"]

_LOCK = ".lock"
_POLL_SECONDS = 0.2

logger = logging.getLogger(__name__)


@contextmanager
def claimed(directory: Path, groups: Groups, *, patience: float = 0.0) -> Iterator[None]:
    """Within, no other training can save to this folder, which is made when missing. Collective.

    Rank 0 holds a lock that ends with its process, however that ends.

    Args:
        directory: where checkpoints are saved.
        groups: this rank's.
        patience: seconds to wait for another training to end.

    Raises:
        CheckpointError: another training saves there, or the folder cannot be made; the same on all ranks.
    """
    with ExitStack() as held:
        with shared_outcome(groups.control, f"preparing to save to {directory}"):
            if groups.world.rank == 0:
                held.enter_context(_locked(directory, patience))
        yield


@contextmanager
def _locked(directory: Path, patience: float) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("a") as file:
        try:
            _lock(file, patience)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another training saves to {directory}; wait until it has ended, "
                "or let save name another folder"
            ) from error
        except OSError as error:
            # Some network file systems have no locks.
            logger.warning(
                "%s cannot be locked (%s): start no second training that saves there",
                directory,
                error.strerror,
            )
        yield


def _lock(file: IO[str], patience: float) -> None:
    """Lock a file.

    Raises:
        BlockingIOError: another process has held its lock all the time.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_SECONDS)
