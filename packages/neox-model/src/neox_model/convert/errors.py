"""Exceptions of conversions."""

from neox_model.errors import ModelError

__all__ = ["ConversionError", "ProofError", "UnwrittenError"]


class ConversionError(ModelError):
    """Raised when a model cannot be converted."""

    exit_code = 2


class ProofError(ConversionError):
    """Raised when a converted model differs from its source."""

    exit_code = 1


class UnwrittenError(ConversionError):
    """Raised when the result cannot be written, for example because the disk is full."""

    exit_code = 1
