"""The errors of this package, all under `KernelError`."""

import re

__all__ = ["KernelBuildError", "KernelError", "KernelUnavailable"]


class KernelError(Exception):
    """Base class of the errors about fused operators.

    Args:
        args: the message.
        code: which check failed; by default the name of the class, such as `kernel-build`.
    """

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        name = type(self).__name__.removesuffix("Error")
        self.code = code or re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


class KernelUnavailable(KernelError):  # noqa: N818 (used throughout the project)
    """A fused operator is required and unavailable."""


class KernelBuildError(KernelError):
    """The CUDA sources could not be compiled."""
