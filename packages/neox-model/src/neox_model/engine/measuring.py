"""Combine the measurements of a step's phases."""

from collections.abc import Iterator
from contextlib import contextmanager

from neox_model.engine.contract import Measure

__all__ = ["measure_both"]


def measure_both(outer: Measure, inner: Measure) -> Measure:
    """Return a measurement that puts each phase into both, the second inside the first."""

    @contextmanager
    def measure(phase: str) -> Iterator[None]:
        with outer(phase), inner(phase):
            yield

    return measure
