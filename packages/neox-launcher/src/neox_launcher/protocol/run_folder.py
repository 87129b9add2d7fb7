"""Private folders that are removed after their process ends, even if it is killed."""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from neox_config.errors import LaunchError

__all__ = ["is_known_file", "run_folder"]

_PREFIX = "neox-"
_LOCK = "neox-run.lock"
# Files of the launcher (backends), of agents and of workers; a leading dot and `.PID.new` while written.
_KNOWN = re.compile(
    r"\.?(rank-\d+\.[a-z.]+|agent\.pid|stop-signal|resolved|bind_cores|token|machines|hosts|given-up-\d+)"
    r"(\.\d+\.new)?"
)


@contextmanager
def run_folder() -> Iterator[Path]:
    """Create a folder that only the user can access, and remove it at the end.

    Folders of killed processes are removed first. Each folder contains a file that names the folder and is
    locked as long as its process runs, which also works across containers.

    Raises:
        LaunchError: the folder cannot be created.
    """
    try:
        folder, lock = _create()
    except OSError as error:
        where = error.filename or "the folder for temporary files"
        raise LaunchError(
            f"{where} cannot be written: {error.strerror}; free disk space, or set TMPDIR to another folder"
        ) from error
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def is_known_file(name: str) -> bool:
    """Return whether a file of this name in a run folder is one of ours; others are never removed."""
    return _KNOWN.fullmatch(name) is not None


def _create() -> tuple[Path, int]:
    """Create a folder with its marker; return it, and the descriptor that keeps the marker locked."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    aside = folder / f".{_LOCK}"
    try:
        lock = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(lock, _marker(folder))
            # Renamed only when it is locked, so that no other process takes the folder for an abandoned one;
            # filelock's FileLock would create and lock it under one name.
            lock_descriptor(lock)
            aside.rename(folder / _LOCK)
        except BaseException:
            os.close(lock)
            raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def _marker(folder: Path) -> bytes:
    """Return the content of a folder's marker; that of another folder or of a copy differs."""
    return f"temporary folder of neox-launcher: {folder.name}, inode {folder.lstat().st_ino}\n".encode()


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            lock = _lock_abandoned(folder)
        except OSError:  # Not ours, or another process has just removed it.
            continue
        if lock is not None:
            try:
                _remove_known_files(folder)
            finally:
                os.close(lock)


def _lock_abandoned(folder: Path) -> int | None:
    """Return the locked descriptor of a folder's marker; None if it is in use or was not made here."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return None
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        marker = _marker(folder)
        is_ours = stat.S_ISREG(os.fstat(lock).st_mode) and os.read(lock, len(marker) + 1) == marker
        if is_ours and lock_descriptor(lock, blocking=False):
            return lock
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _remove_known_files(folder: Path) -> None:
    """Remove the files that this package creates, and the folder if it contains nothing else."""
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.name != _LOCK]
    known = [
        entry for entry in files if is_known_file(entry.name) and not entry.is_dir(follow_symlinks=False)
    ]
    try:
        for entry in known:
            os.unlink(entry.path)
        if len(known) == len(files):
            (folder / _LOCK).unlink()
            folder.rmdir()
    except OSError:  # It stays for the next launch.
        return
