"""Ends of an evaluation before it has results, on all replicas together."""

from collections.abc import Callable
from typing import TypeVar

from neox_model.checkpoint.outcome import gather
from neox_model.errors import ModelError
from neox_model.parallel.groups import Group

__all__ = [
    "NOT_FINITE",
    "STOPPED",
    "EvaluationEndedError",
    "NotFiniteError",
    "StoppedError",
    "gather_unless_ended",
]

NOT_FINITE = (
    "the model's output is not finite, so texts cannot be scored; evaluate a checkpoint from before the loss "
    "diverged, or compute in a precision of a larger range, such as bfloat16 for fp16"
)
STOPPED = "a signal requested the end before the evaluation was complete"

_Found = TypeVar("_Found")


class EvaluationEndedError(ModelError):
    """Base class of what ends an evaluation on all ranks, and does not end a training."""


class NotFiniteError(EvaluationEndedError):
    """Raised when the model's output is not finite."""


class StoppedError(EvaluationEndedError):
    """Raised when a signal requests the end."""


def gather_unless_ended(control: Group, work: Callable[[], _Found]) -> list[_Found]:
    """Return what `work` returns on every rank, ordered by rank. Collective over the control group.

    Args:
        control: CPU group of all ranks.
        work: may communicate within a copy of the model, and raises an EvaluationEndedError on all ranks of
            the copy or on none. Other errors are raised at once, and must end the process: other ranks wait.

    Raises:
        EvaluationEndedError: `work` raised it on any rank; the same on all ranks.
    """
    found: _Found | EvaluationEndedError
    try:
        found = work()
    except EvaluationEndedError as error:
        found = error
    every = gather(control, found)
    for one in every:
        if isinstance(one, EvaluationEndedError):
            raise one
    return every
