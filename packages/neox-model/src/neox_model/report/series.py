"""Reduce long curves to few points that keep every extreme value."""

from dataclasses import dataclass

import numpy as np

from neox_model.report.reading import Column

__all__ = ["MOST_POINTS", "Curve", "curve_of"]

MOST_POINTS = 400


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of at most `MOST_POINTS` bins of iterations.

    Args:
        at: middle iteration of each bin.
        mean: mean of its values.
        low: least of its values.
        high: largest of its values.
        left_out: number of values that are not finite.
        is_exact: every bin is one value.
    """

    at: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    left_out: int
    is_exact: bool


def curve_of(column: Column, *, scale: float = 1.0) -> Curve:
    """Return the curve of a metric, its values multiplied by a scale."""
    iterations = np.frombuffer(column.iterations, dtype=np.int64)
    values = np.frombuffer(column.values, dtype=np.float64) * scale
    finite = np.isfinite(values)
    left_out = int(len(values) - finite.sum())
    iterations, values = iterations[finite], values[finite]
    order = np.argsort(iterations, kind="stable")
    iterations, values = iterations[order], values[order]
    if len(values) <= MOST_POINTS:
        exact = values.tolist()
        return Curve(iterations.tolist(), exact, exact, exact, left_out, is_exact=True)
    span = int(iterations[-1] - iterations[0]) + 1
    bins = (iterations - iterations[0]) * MOST_POINTS // span
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    counts = np.diff(starts, append=len(values))
    return Curve(
        at=(np.add.reduceat(iterations, starts) / counts).tolist(),
        mean=(np.add.reduceat(values, starts) / counts).tolist(),
        low=np.minimum.reduceat(values, starts).tolist(),
        high=np.maximum.reduceat(values, starts).tolist(),
        left_out=left_out,
        is_exact=False,
    )
