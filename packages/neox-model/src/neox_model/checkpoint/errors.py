"""Exceptions of the checkpoint package."""

from pathlib import Path

from neox_config.errors import NeoXError

__all__ = ["CheckpointError", "DamagedCheckpointError", "DamagedManifestError", "FolderInUseError", "quoted"]


class CheckpointError(NeoXError):
    """Raised when a checkpoint cannot be written, found or read; the message names file and remedy."""


class FolderInUseError(CheckpointError):
    """Raised when another run holds the lock of a folder."""

    is_refused_start = True


class DamagedCheckpointError(CheckpointError):
    """Raised when a file of a checkpoint is missing, truncated or altered."""


class DamagedManifestError(DamagedCheckpointError):
    """Raised when a manifest that can be read contains a value that no run writes.

    Args:
        problem: place and value.
        folder: the checkpoint, if its callers do not name it.
    """

    def __init__(self, problem: object, folder: Path | None = None) -> None:
        place = "" if folder is None else f"{folder}: "
        super().__init__(f"{place}the manifest is damaged: {problem}; restore it from a copy")


_QUOTED_CHARACTERS = 80


def quoted(text: str) -> str:
    """Return text of a file for a message: printable, at most 80 characters."""
    start = text[:_QUOTED_CHARACTERS]
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in start)
    is_cut = len(shown) > _QUOTED_CHARACTERS or len(text) > _QUOTED_CHARACTERS
    return shown[: _QUOTED_CHARACTERS - 3] + "..." if is_cut else shown
