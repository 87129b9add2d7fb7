"""What a metric writer does."""

from collections.abc import Mapping
from typing import Protocol

__all__ = ["MetricWriter"]


class MetricWriter(Protocol):
    """Takes numbers over time; names are `group/name`."""

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Record these numbers as those of an iteration; may buffer them."""

    def flush(self) -> None:
        """Make everything written so far visible to readers."""

    def close(self) -> None:
        """Flush and let go of files and connections."""
