"""Files that users name: why one cannot be read, as a text and never as an exception."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

__all__ = ["names_in", "why_not_readable"]


def why_not_readable(path: str | os.PathLike[str]) -> str | None:
    """Return why a path is not a file that this user can read, or None if it is one.

    `pathlib` raises for paths behind folders that this user cannot enter, and for names that are too long.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if stat.S_ISDIR(mode):
        return "is a folder"
    if not stat.S_ISREG(mode):
        return "is not a regular file"
    return None if os.access(path, os.R_OK) else f"cannot be read ({os.strerror(errno.EACCES)})"


def names_in(folder: Path, where: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Return the sorted names of a folder's entries that fulfil a condition; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if where(entry))
    except OSError:
        return []
