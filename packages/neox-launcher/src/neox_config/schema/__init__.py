"""Declarations of parameters, their sections, and switches that are refused."""
