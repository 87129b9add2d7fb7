"""Write files atomically, hash them, and lock between processes.

Writing and locking use filelock's kernel locks, which are released when their process ends for any reason. A
part file has a fixed name, so that the next attempt replaces the one of a killed process.
"""

import errno
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout, lock_descriptor

from neox_data.errors import DataError

__all__ = ["NO_ROOM", "exclusive_lock", "naming_when_full", "sha256_of_file", "written_aside"]

logger = logging.getLogger(__name__)

# The disk or the user's quota is full, or the file size limit is reached.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHORT_WAIT_SECONDS = 1.0
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Provide a binary file that appears at `path` if the block succeeds, and is removed if it raises.

    Raises:
        DataError: another process is writing the same file, or the path has no file name.
        OSError: the folder is missing or cannot be written, or the disk is full; it names the file.
    """
    if not path.name:
        raise DataError(f"{str(path)!r} is a folder, not a file; append a file name", code="is-a-folder")
    if path.exists() and not (path.is_file() or path.is_dir()):
        # The rename would put a file in place of /dev/stdout, for example.
        raise DataError(f"{path} is not a regular file; give another path")
    part = path.with_name(f".{path.name}.part")
    with naming_when_full(path, part):
        file = _open_locked(part)
        if file is None:
            raise DataError(
                f"{path} is being written by another process; "
                "wait until it has finished, or use another name",
                code="in-use",
            )
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            # After a failure, closing tries again to write the buffer; only the first error is useful.
            with suppress(OSError):
                file.close()


@contextmanager
def naming_when_full(path: Path, *aside: Path) -> Iterator[None]:
    """Name a target in errors of a full disk, which name no file, and in errors of files aside of it.

    Raises:
        OSError: the error of the block, with the name of the target.
    """
    try:
        yield
    except OSError as error:
        is_aside = error.filename in map(str, aside)
        if not is_aside and (error.filename or error.errno not in NO_ROOM):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def exclusive_lock(path: Path, *, purpose: str) -> Iterator[None]:
    """Hold the lock file `path`; wait while another process holds it, and log the purpose after a second."""
    # Without kernel locks, filelock would fall back to a file that a killed process leaves locked.
    lock = FileLock(path, fallback_to_soft=False)
    with _without_locks_warn(path):
        try:
            lock.acquire(timeout=_SHORT_WAIT_SECONDS, poll_interval=_SHORT_WAIT_SECONDS / 100)
        except Timeout:
            logger.info("waiting for another process: %s", purpose)
            lock.acquire()
    try:
        yield
    finally:
        # Removed while it is locked; a waiting process then locks a new file.
        path.unlink(missing_ok=True)
        lock.release()


def _open_locked(path: Path) -> BinaryIO | None:
    """Return the file, opened and locked; None if another process holds it.

    The locked file is the one that is written and renamed, so that no lock file is left next to it; FileLock
    does not give its file away, and does not notice a renamed one.
    """
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "r+b")
        try:
            is_locked = True
            with _without_locks_warn(path):
                is_locked = lock_descriptor(file.fileno(), blocking=False)
        except BaseException:
            file.close()
            raise
        with suppress(FileNotFoundError):
            if is_locked and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()
        if not is_locked:
            return None
        # Another process renamed or removed the file between opening and locking.


@contextmanager
def _without_locks_warn(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        logger.warning("%s: this file system has no locks; several processes may do the same work", path)
