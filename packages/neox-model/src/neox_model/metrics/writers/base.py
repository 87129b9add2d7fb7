"""The interface of metric writers."""

from collections.abc import Mapping
from typing import Protocol

__all__ = ["MetricWriter"]


class MetricWriter(Protocol):
    """Writes metrics over time; names are `group/name`."""

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write the metrics of an iteration; may buffer them."""

    def flush(self) -> None:
        """Make all written metrics visible to readers."""

    def close(self) -> None:
        """Flush, and close files and connections."""
