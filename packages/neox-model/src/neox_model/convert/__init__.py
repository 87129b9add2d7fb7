"""Conversion of models between our checkpoints and other formats."""
