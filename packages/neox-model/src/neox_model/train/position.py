"""How much data a training has used. Without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

__all__ = ["START", "Position"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a training is in its data.

    Args:
        iteration: optimizer updates done.
        samples: training samples read, by all data-parallel ranks.
        validation_samples: validation samples that the evaluations so far were given.
    """

    iteration: int = 0
    samples: int = 0
    validation_samples: int = 0

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> Self:
        """The position in a checkpoint's state of the training loop; the start without one."""
        return cls() if state is None else cls(**{each.name: int(state[each.name]) for each in fields(cls)})


START = Position()
