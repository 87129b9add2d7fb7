"""Private folders for the files of a launch, removed when their process ends."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neox_config.errors import LaunchError

__all__ = ["no_room", "run_folder"]


@contextmanager
def run_folder() -> Iterator[Path]:
    """Create a folder that only the user can access, and remove it at the end.

    Raises:
        LaunchError: the folder cannot be created.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="neox-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(no_room(error), code="not-writable") from error
    with folder as path:
        yield Path(path)


def no_room(error: OSError) -> str:
    """Return the message for a file that cannot be written in the folder for temporary files."""
    where = error.filename or "the folder for temporary files"
    return f"{where} cannot be written: {error.strerror}; free disk space, or set TMPDIR to another folder"
