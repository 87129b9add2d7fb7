"""The numbers of updates and samples of an engine, under the names of DeepSpeed's."""

from collections.abc import Mapping
from typing import Any

__all__ = ["Counters"]


class Counters:
    """Counts updates, the skipped ones included, and their samples.

    Args:
        samples: samples per update, over all data-parallel ranks.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._counts = {"global_steps": 0, "global_samples": 0}

    def advance(self) -> None:
        """Count one update."""
        self._counts["global_steps"] += 1
        self._counts["global_samples"] += self._samples

    def state_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return dict(self._counts)

    def missing(self, state: Mapping[str, Any]) -> set[str]:
        """Return the names of the counts that a state lacks."""
        return self._counts.keys() - {name for name, value in state.items() if value is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self._counts = {name: int(state[name]) for name in self._counts}
