"""What can go wrong with a checkpoint."""

from neox_launcher.errors import NeoXError

__all__ = ["CheckpointError", "DamagedCheckpointError"]


class CheckpointError(NeoXError):
    """A checkpoint cannot be written, found or read; the message names the file and the remedy."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is absent, truncated or altered."""
