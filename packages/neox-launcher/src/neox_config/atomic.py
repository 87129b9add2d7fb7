"""Write files atomically: under a temporary name in the same folder, then renamed."""

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

__all__ = ["NO_ROOM", "atomic_write", "flush_file", "flush_folder", "set_aside", "write_new", "written_aside"]

# Some file systems have no hard links, such as those of USB sticks and object stores.
_NO_LINKS_HERE = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing to a disk that is full, or a file that reaches its limit."""


class NotAFileError(OSError):
    """A path to write is that of a device or a pipe."""

    exit_code = 2


def _refuse_others(path: Path) -> None:
    """Refuse what is no regular file: the rename would put a file in place of /dev/stdout, for example."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise NotAFileError(errno.EINVAL, "not a regular file; give another path", str(path))


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o666, is_durable: bool = False) -> Iterator[TextIO]:
    """Provide a text file that replaces `path` after the block.

    If the block raises, the temporary file is removed and `path` is unchanged.

    Args:
        path: the file to write; its folder must exist.
        mode: permissions, from which the umask is subtracted.
        is_durable: wait until the file and its name are on disk, so that they survive a loss of power.

    Raises:
        OSError: the file cannot be written or renamed, or is a device, a pipe or a folder.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    create = partial(_create, mode=mode)
    with _replacing(path, aside), open(aside, "w", encoding="utf-8", newline="", opener=create) as file:
        yield file
        if is_durable:
            flush_file(file)
    if is_durable:
        flush_folder(path.parent)


@contextmanager
def _replacing(path: Path, aside: Path) -> Iterator[None]:
    """Rename one path to the other after the block; if it raises, remove the first, which no error names."""
    try:
        _refuse_others(path)
        yield
        aside.replace(path)
    except BaseException as error:
        with suppress(OSError):  # The first error is the useful one.
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            is_full = error.filename is None and error.errno in NO_ROOM
            if is_full or error.filename in (aside, str(aside)):
                raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


def flush_file(file: IO[Any]) -> None:
    """Wait until the contents of an open file are on disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(paths: Iterable[Path], text: str) -> Path:
    """Write a text to the first of some paths that has no file; another program may do the same.

    The file appears complete. No lock is left by a process that is killed: a path is taken by linking the
    temporary file to it, which fails if there is a file.

    Args:
        paths: names in one folder, without end.
        text: what to write.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written or linked.
    """
    left = iter(paths)
    path = next(left)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.new")
    try:
        with open(aside, "w", encoding="utf-8", newline="", opener=_create) as file:
            file.write(text)
        while not _is_taken(aside, path):
            path = next(left)
    finally:
        with suppress(OSError):  # The first error is the useful one.
            aside.unlink(missing_ok=True)
    return path


def _create(name: str, flags: int, mode: int = 0o666) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, mode)


def _is_taken(aside: Path, path: Path) -> bool:
    """Give a file a name as well, and return True; False if there is a file of this name."""
    try:
        path.hardlink_to(aside)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS_HERE:
            raise
        # Between these two calls another program may take the name.
        if path.exists():
            return False
        aside.rename(path)
    return True


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Provide a temporary name for a function that writes a file itself; rename that file after the block.

    If the block raises, the temporary file is removed and `path` is unchanged.

    Args:
        path: the file to write; its folder must exist. The temporary name has the same suffixes.

    Raises:
        OSError: the file cannot be renamed, or is a device, a pipe or a folder.
    """
    aside = path.with_name(f".{os.getpid()}.{path.name}")
    with _replacing(path, aside):
        yield aside


def set_aside(paths: Sequence[Path]) -> list[Path]:
    """Rename files of an earlier run from `NAME.csv` to `NAME.N.csv`, all with the first N that is free.

    Args:
        paths: the files; those that do not exist are left out.

    Returns:
        The new names.

    Raises:
        OSError: a file cannot be renamed.
    """
    number = 1
    while any(_numbered(path, number).exists() for path in paths):
        number += 1
    return [path.rename(_numbered(path, number)) for path in paths if path.exists()]


def _numbered(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}")
