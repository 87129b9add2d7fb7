"""Conversion of models between our checkpoints and other formats."""

__all__ = ["PARENT"]

PARENT = "NEOX_CONVERT_PARENT"
"""Environment variable with the id of a process; the conversion ends when that process ends."""
