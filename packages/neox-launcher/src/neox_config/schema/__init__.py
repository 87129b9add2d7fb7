"""Declarations of parameters, their sections, and values that are not implemented yet."""
