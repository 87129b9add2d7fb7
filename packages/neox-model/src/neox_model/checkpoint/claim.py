"""One training at a time saves to a folder: two would tidy away each other's unfinished checkpoints."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.parallel.groups import Groups

__all__ = ["claimed"]

_LOCK = ".lock"

logger = logging.getLogger(__name__)


@contextmanager
def claimed(directory: Path, groups: Groups) -> Iterator[None]:
    """Within, no other training can save to this folder, which is made when missing. Collective.

    Rank 0 holds a lock that ends with its process, however that ends.

    Raises:
        CheckpointError: another training saves there, or the folder cannot be made; the same on all ranks.
    """
    with ExitStack() as held:
        with shared_outcome(groups.control, f"preparing to save to {directory}"):
            if groups.world.rank == 0:
                held.enter_context(_locked(directory))
        yield


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
