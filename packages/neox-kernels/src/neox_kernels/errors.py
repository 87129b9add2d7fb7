"""The errors of this package, all under `KernelError`."""

__all__ = ["KernelBuildError", "KernelError", "KernelUnavailable"]


class KernelError(Exception):
    """Something about a fused operator is wrong; the message says what, why, and what to do."""


class KernelUnavailable(KernelError):  # noqa: N818 (named as the rest of the project speaks of it)
    """A fused operator was asked for by name and cannot be used here."""


class KernelBuildError(KernelError):
    """The CUDA sources could not be compiled."""
