"""Files that are complete or absent, and locks between processes that die with their holder.

Both rest on `flock`: the kernel drops the lock when the holder ends, however it ends, so nothing is ever left
locked. A part file has a fixed name, so that the next attempt reuses what a killed one left instead of adding
to it.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from neox_data.errors import DataError

__all__ = ["NO_ROOM", "exclusive_lock", "written_aside"]

logger = logging.getLogger(__name__)

# The disk is full, or the user's share of it, or a file may not become longer.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHORT_WAIT_SECONDS = 1.0
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears at `path` when the block ends well, and leaves nothing when it raises.

    Raises:
        DataError: another process is writing the same file, or the path names none.
        OSError: the folder is missing or cannot be written, or the disk is full; it names the file.
    """
    if not path.name:
        raise DataError(f"{str(path)!r} is a folder, not a file to write; give a name in it")
    part = path.with_name(f".{path.name}.part")
    with _named(path, part):
        file = _open_locked(part, wait=False)
        if file is None:
            raise DataError(
                f"{path} is being written by another process; wait for it, or choose another name"
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
            # After a failure closing tries once more to write what is buffered. The first error is of use.
            with suppress(OSError):
                file.close()


@contextmanager
def _named(path: Path, part: Path) -> Iterator[None]:
    """An error of the part file names the file that was to be written, and so does a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename != str(part) and (error.filename or error.errno not in NO_ROOM):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def exclusive_lock(path: Path, *, purpose: str) -> Iterator[None]:
    """Hold the lock file `path`; wait while another process holds it, and say for what when it takes long."""
    file = _open_soon(path)
    if file is None:
        logger.info("waiting for another process: %s", purpose)
        file = _open_locked(path, wait=True)
    assert file is not None
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _open_soon(path: Path) -> BinaryIO | None:
    """The file, locked; None when someone else has held it for a second."""
    until = time.monotonic() + _SHORT_WAIT_SECONDS
    while True:
        file = _open_locked(path, wait=False)
        if file is not None or time.monotonic() > until:
            return file
        time.sleep(_SHORT_WAIT_SECONDS / 100)


def _open_locked(path: Path, *, wait: bool) -> BinaryIO | None:
    """The file, opened for writing and locked; None when someone else holds it and `wait` is false."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "r+b")
        if not _lock(file, wait=wait):
            file.close()
            return None
        if _is_still_at(file, path):
            return file
        # The former holder renamed or removed the file between our opening and our locking it.
        file.close()


def _lock(file: BinaryIO, *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            file.close()
            raise
        logger.warning("%s: this file system has no locks; processes may repeat each other's work", file.name)
    return True


def _is_still_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
