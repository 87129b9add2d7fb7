"""The errors of this package, all under `KernelError`."""

__all__ = ["KernelBuildError", "KernelError", "KernelUnavailable"]


class KernelError(Exception):
    """Base class of the errors about fused operators."""


class KernelUnavailable(KernelError):  # noqa: N818 (used throughout the project)
    """A fused operator is required and unavailable."""


class KernelBuildError(KernelError):
    """The CUDA sources could not be compiled."""
