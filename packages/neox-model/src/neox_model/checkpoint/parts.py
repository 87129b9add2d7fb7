"""The parts of a training run that a checkpoint saves and restores."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from neox_config.facts.learning_rate import Curve
from neox_model.checkpoint.storage import Storage
from neox_model.engine.contract import Engine
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import LogicalState

__all__ = ["Restorable", "RunParts", "Schedule"]


class Restorable(Protocol):
    """An object whose state consists of plain JSON values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""


class Schedule(Restorable, Protocol):
    """A learning-rate schedule."""

    curve: Curve

    def accepts(self, curve: Curve) -> bool:
        """Return True unless the curve changes a momentum that the optimizer does not have."""


@dataclass(slots=True, kw_only=True)
class RunParts:
    """The parts of a training run with state.

    Args:
        engine: the engine, between two iterations; it has the model, the master weights and the optimizer.
        groups: this rank's process groups.
        schedule: the learning-rate schedule.
        state: the training loop's state.
        storage: the folders of checkpoints; None: all ranks share one.
        model_states: states of the model that are no weights, which are changed in place.
    """

    engine: Engine
    groups: Groups
    schedule: Schedule
    state: Restorable
    storage: Storage | None = None
    model_states: list[LogicalState] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """Return the module inside the engine."""
        return self.engine.model
