"""Ends of an evaluation before it has results, on all replicas together."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

from neox_model.errors import ModelError
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Group

__all__ = [
    "STOPPED",
    "EvaluationEndedError",
    "NotFiniteError",
    "StoppedError",
    "gather_in_sections",
]

STOPPED = "a signal requested the end before the evaluation was complete"

# A turn is a forward pass, or some tokens of a batch of texts.
_SECTION_TURNS = 16

_Found = TypeVar("_Found")


class EvaluationEndedError(ModelError):
    """Base class of what ends an evaluation on all ranks, and does not end a run."""


class NotFiniteError(EvaluationEndedError):
    """Raised when the model's output is not finite."""


class StoppedError(EvaluationEndedError):
    """Raised when a signal requests the end."""


def gather_in_sections(control: Group, turns: Iterable[Sequence[_Found]]) -> list[list[_Found]]:
    """Return everything that `turns` yields on every rank, ordered by rank. Collective.

    All ranks meet after every few turns, so that a rank without further work waits for a part of the others'
    work, not for all of it: that may take longer than the time limit of the group.

    Args:
        control: CPU group of all ranks.
        turns: this rank's work, divided into turns of seconds; yields what was found, also nothing, after
            each. May communicate within a copy of the model, whose ranks have equally many turns, and raises
            an EvaluationEndedError on all ranks of the copy or on none. Other errors are raised at once, and
            must end the process: other ranks wait.

    Raises:
        EvaluationEndedError: `turns` raised it on any rank; the same on all ranks, after this section.
    """
    found: list[list[_Found]] = [[] for _ in range(control.size)]
    left = iter(turns)
    while True:
        mine: list[_Found] = []
        count, ended = 0, None
        try:
            for one in islice(left, _SECTION_TURNS):
                mine += one
                count += 1
        except EvaluationEndedError as error:
            ended = error
        # What each rank found, and whether and why it has ended.
        every = all_gather_object(control, (mine, count < _SECTION_TURNS, ended))
        for _, _, ending in every:
            if ending is not None:
                raise ending
        for whole, (new, _, _) in zip(found, every, strict=True):
            whole += new
        if all(is_last for _, is_last, _ in every):
            return found
