"""Mistakes that are planted in the run of `verify-layout` on a layout, and what is found of them."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from torch import distributed

from neox_launcher.protocol.layout_verification import LayoutAnswer

__all__ = [
    "Fault",
    "Make",
    "differing",
    "first_argument",
    "names_it",
    "nothing",
    "on_rank",
    "rank",
    "texts",
    "times",
]

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Fault:
    """A mistake.

    Args:
        layout: as after `--layout`.
        at: what is replaced.
        make: returns the replacement, given what is replaced.
        says: patterns, which one finding must match all.
        settings: of the model.
        is_quick: one of the few that `make test` plants.
    """

    layout: str
    at: str
    make: Make
    says: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    is_quick: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch(self.at, self.make(resolve_name(self.at))):
            yield


def rank() -> int:
    return distributed.get_rank()


def on_rank(number: int, make: Make) -> Make:
    return lambda original: make(original) if rank() == number else original


def nothing(original: Any) -> Any:
    return lambda *arguments, **named: None


def times(factor: float) -> Make:
    return lambda original: lambda *arguments, **named: factor * original(*arguments, **named)


def first_argument(original: Any) -> Any:
    return lambda first, *others: first


def differing(answer: LayoutAnswer) -> list[str]:
    return [part.name for part in answer.parts if part.differing]


def texts(answer: LayoutAnswer) -> list[str]:
    return [f"{finding.what}: {finding.meaning}" for finding in answer.findings]


def names_it(finding: str, says: tuple[str, ...]) -> bool:
    return all(re.search(pattern, finding) for pattern in says)
