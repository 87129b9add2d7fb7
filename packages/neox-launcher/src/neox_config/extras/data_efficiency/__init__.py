"""Curricula, and random layer-wise token dropping."""
