"""Compression in training."""
