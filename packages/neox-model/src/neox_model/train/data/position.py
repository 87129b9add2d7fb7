"""The position of a run in its data. Without torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from neox_data.batch_sizes import BatchSizes

__all__ = ["START", "Position", "Ranges", "as_ranges", "merged"]

Ranges = tuple[tuple[int, int], ...]
"""Ranges of samples: the first of each, and the one after its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a run in its data.

    Args:
        iteration: finished optimizer updates.
        samples: training samples read by all data-parallel ranks.
        validation_samples: validation samples used by evaluations, with those of one that is due.
        due_validation: the first of these, with which a resumed run begins; None: none is due.
        batch_sizes: (iteration, samples) pairs: samples per iteration, starting at that iteration. They do
            not add up to `samples` if a checkpoint did not record all of them.
        left_out: ranges of samples that are read but not trained on, because the loss of a batch was a spike.
    """

    iteration: int = 0
    samples: int = 0
    validation_samples: int = 0
    due_validation: int | None = None
    batch_sizes: tuple[tuple[int, int], ...] = ()
    left_out: Ranges = ()

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> Self:
        """Return the position in a checkpoint's state of the training loop; the start if there is none."""
        if state is None:
            return cls()
        due = state.get("due_validation")
        return cls(
            iteration=int(state["iteration"]),
            samples=int(state["samples"]),
            validation_samples=int(state["validation_samples"]),
            due_validation=None if due is None else int(due),
            batch_sizes=tuple((int(iteration), int(samples)) for iteration, samples in state["batch_sizes"]),
            left_out=as_ranges(state.get("left_out", ())),
        )

    @property
    def knows_batch_sizes(self) -> bool:
        """Return True if the batch sizes of all finished iterations are known."""
        return BatchSizes(self.batch_sizes).first_item(self.iteration) == self.samples


def as_ranges(pairs: Sequence[Sequence[int]]) -> Ranges:
    """Return the ranges that JSON stores as lists."""
    return tuple((int(first), int(stop)) for first, stop in pairs)


def merged(*ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all ranges, each once, in order."""
    return tuple(sorted({each for some in ranges for each in some}))


START = Position()
