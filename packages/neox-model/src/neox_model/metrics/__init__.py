"""Measure and write metrics."""
