"""What the names of logical tensors mean."""

import re
from collections.abc import Iterable

__all__ = [
    "average_name",
    "in_model_order",
    "is_model_state",
    "is_random_state",
    "is_score",
    "is_weight",
    "model_state_name",
    "rng_prefix",
    "state_of",
]

_RANDOM = "rng/"
_OF_MODEL = "model/"
# Python converts no more than 4,300 digits.
_NUMBER = re.compile(r"(\d{1,18})")


def is_weight(name: str) -> bool:
    """Return whether a tensor is a weight; the names of all others have a slash."""
    return "/" not in name


def is_score(name: str) -> bool:
    """Return whether a weight is a score of a mask, which a model that is not pruned does not have."""
    return name.endswith(".scores")


def is_model_state(name: str) -> bool:
    """Return whether a tensor is a state of the model that is no weight, such as a mask."""
    return name.startswith(_OF_MODEL)


def model_state_name(name: str) -> str:
    """Return the name of a tensor with a state of the model, given the state's."""
    return f"{_OF_MODEL}{name}"


def average_name(weight: str) -> str:
    """Return the name of the state of the model that is the average of a weight (`ema_decay`)."""
    return f"{weight}/ema"


def is_random_state(name: str) -> bool:
    """Return whether a tensor is the state of a random generator."""
    return name.startswith(_RANDOM)


def rng_prefix(rank: int) -> str:
    """Return the prefix of the tensor names of a rank's random generators."""
    return f"{_RANDOM}{rank}/"


def state_of(name: str) -> str | None:
    """Return the name of an optimizer state, such as exp_avg; None for other tensors."""
    is_other = is_weight(name) or is_random_state(name) or is_model_state(name)
    return None if is_other else name.rpartition("/")[2]


def in_model_order(names: Iterable[str]) -> list[str]:
    """Return the names sorted: layer 10 comes after layer 9, and the final parts come after the layers."""

    def key(name: str) -> tuple[int, list[tuple[int, int | str]]]:
        parts = [(0, int(part)) if part.isdecimal() else (1, part) for part in _NUMBER.split(name)]
        place = 0 if name.startswith("embedding") else 1 if name.startswith("layers.") else 2
        return place, parts

    return sorted(names, key=key)
