"""Requests of `verify-resume` to its workers, and the answer of the comparison.

Requests travel as environment variables of the workers, the answer as the facts of the comparing worker.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

__all__ = ["Answer", "Check", "Comparison", "Recording", "Side"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a training writes down about each of its steps.

    Args:
        folder: receives one file per rank.
        iteration: the iteration after which (or at which, where the training starts there) the state is
            recorded: where the other training is interrupted.
        snapshot: folder for a checkpoint of that state; None writes none.
    """

    folder: str
    iteration: int
    snapshot: str | None = None

    VARIABLE: ClassVar[str] = "NEOX_RECORD_STEPS"

    def as_variables(self) -> dict[str, str]:
        """Environment variables for the workers of a training."""
        return {self.VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self | None:
        """Read the request to this worker; None where nothing is to be recorded."""
        text = os.environ.get(cls.VARIABLE)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is known of one training.

    Args:
        record: folder with the record of its steps; None where there is none.
        middle: checkpoint folder with its state where the other is interrupted; None where there is none.
        end: checkpoint folder with its last state; None where there is none.
        metrics: file with its metrics, for a training that left no record.
    """

    record: str | None = None
    middle: str | None = None
    end: str | None = None
    metrics: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the comparing worker compares.

    Args:
        expected: the training that was not interrupted, or that wrote the kept checkpoints.
        interrupted: the training up to the interruption; nothing is known of one that wrote kept checkpoints.
        resumed: the training from the interruption on.
        start: iteration at which the first two start.
        middle: iteration of the interruption.
        end: last iteration.
        samples: samples of an iteration.
        rounding: precision by whose rounding the trainings may differ; None demands equality to the last bit.
        same_sizes: the parallel sizes are the same, so random streams continue.
    """

    expected: Side
    interrupted: Side
    resumed: Side
    start: int
    middle: int
    end: int
    samples: int
    rounding: str | None
    same_sizes: bool

    VARIABLE: ClassVar[str] = "NEOX_COMPARE_TRAININGS"

    def as_variables(self) -> dict[str, str]:
        """Environment variables for the comparing worker."""
        return {self.VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self:
        """Read the request to this worker; KeyError where nothing asked for it."""
        content = json.loads(os.environ[cls.VARIABLE])
        sides = {name: Side(**content[name]) for name in ("expected", "interrupted", "resumed")}
        return cls(**{**content, **sides})


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result for one kind of thing that was compared.

    Args:
        name: what was compared.
        compared: how much of it, in words.
        differing: how much of that differs, in words; empty where everything agrees.
        worst: largest difference found, in words; empty where there is none to speak of.
        skipped: why it was not compared; empty where it was.
    """

    name: str
    compared: str
    differing: str = ""
    worst: str = ""
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a comparison.

    Args:
        checks: in the order of the table.
        first: the first difference, in words; empty where everything agrees.
        explanation: what it means, or what to do; may be empty.
    """

    checks: tuple[Check, ...]
    first: str = ""
    explanation: str = ""

    def as_facts(self) -> dict[str, Any]:
        """Plain values; `from_facts` reads them."""
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `as_facts` wrote; further keys are ignored."""
        checks = tuple(Check(**check) for check in facts["checks"])
        return cls(checks=checks, first=facts["first"], explanation=facts["explanation"])
