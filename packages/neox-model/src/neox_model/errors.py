"""Exceptions of the model and its parts."""

from neox_config.errors import NeoXError

__all__ = ["LayoutError", "ModelError", "StopRequested"]


class ModelError(NeoXError):
    """Base class of errors about the model and its parts."""


class LayoutError(ModelError):
    """Raised when sizes do not divide: heads by ranks, widths by heads, layers by stages."""

    exit_code = 2


class StopRequested(ModelError):  # noqa: N818 (a request, not an error)
    """Raised to end a program that a signal asked to stop.

    Args:
        message: which signal was received.
        exit_code: of the program.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
