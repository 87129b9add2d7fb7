"""The numbers of updates and samples of an engine, under the names of DeepSpeed's."""

from collections.abc import Mapping
from typing import Any

from neox_model.engine.own_update import OwnUpdate

__all__ = ["Counters", "SavedState"]


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


class SavedState:
    """What a checkpoint stores of an engine that makes our update: its counters and the loss scale."""

    update: OwnUpdate
    _counters: Counters

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the loss scale."""
        return self._counters.state_dict() | self.update.loss_scale_state()

    def missing_counters(self, state: Mapping[str, Any]) -> set[str]:
        """Return the counters that a state lacks."""
        return self._counters.missing(state)

    def load_state_dict(self, state: Mapping[str, Any], *, loss_scale: bool) -> None:
        """Restore the counters, and the loss scale if requested."""
        self._counters.load_state_dict(state)
        # DeepSpeed's loss scale, if it does not change, was once saved without its counters.
        if loss_scale and state.get("cur_iter") is not None:
            self.update.load_loss_scale(state)
