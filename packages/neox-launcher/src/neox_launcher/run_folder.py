"""Private folders that go with the process that made them, however it ends."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["run_folder"]

_PREFIX = "neox-"
_LOCK = "lock"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder that only the user can enter, removed at the end.

    Folders whose makers were killed are removed first: each holds a file that is locked while its maker
    lives, whichever container that is in.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / f".{_LOCK}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Under its name only once it is locked: until then nobody takes the folder for an abandoned one.
            (folder / f".{_LOCK}").rename(folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            is_mine = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if is_mine and _is_abandoned(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # Another process has just removed it.
            continue


def _is_abandoned(lock: Path) -> bool:
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
