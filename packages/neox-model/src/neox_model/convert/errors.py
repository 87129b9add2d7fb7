"""Exceptions of conversions."""

from neox_model.errors import ModelError

__all__ = ["ConversionError", "ProofError"]


class ConversionError(ModelError):
    """Raised when a model cannot be converted."""


class ProofError(ConversionError):
    """Raised when a converted model differs from its source."""
