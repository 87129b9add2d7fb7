"""Requests of `verify-resume` to its workers, and the result of the comparison.

Requests are passed as environment variables of the workers, the result as the facts of the comparing worker.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

__all__ = ["Answer", "Check", "Comparison", "Recording", "Side"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Request to record every step of a run.

    Args:
        folder: folder for one file per rank.
        iteration: iteration of the interruption, after which the state is recorded; a run that starts
            there records its initial state.
        snapshot: folder for a checkpoint of that state; None for no checkpoint.
    """

    folder: str
    iteration: int
    snapshot: str | None = None

    VARIABLE: ClassVar[str] = "NEOX_RECORD_STEPS"

    def as_variables(self) -> dict[str, str]:
        """Return the environment variables for the workers of a run."""
        return {self.VARIABLE: json.dumps(asdict(self), allow_nan=False)}

    @classmethod
    def from_environment(cls) -> Self | None:
        """Read the request to this worker; None if there is none."""
        text = os.environ.get(cls.VARIABLE)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Files of one run.

    Args:
        record: folder with the record of its steps.
        middle: checkpoint folder with its state at the interruption; None if there is none.
        end: checkpoint folder with its last state; None if there is none.
    """

    record: str
    middle: str | None = None
    end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Request to compare runs.

    Args:
        expected: the uninterrupted run.
        interrupted: the run up to the interruption.
        resumed: the run after the interruption.
        start: iteration at which the first two start.
        middle: iteration of the interruption.
        end: last iteration.
        samples: samples per iteration.
        rounding: precision whose rounding errors are tolerated; None requires bitwise equality.
        same_sizes: the parallel sizes are the same, so random states are continued.
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
        """Return the environment variables for the comparing worker."""
        return {self.VARIABLE: json.dumps(asdict(self), allow_nan=False)}

    @classmethod
    def from_environment(cls) -> Self:
        """Read the request to this worker.

        Raises:
            KeyError: there is no request.
        """
        content = json.loads(os.environ[cls.VARIABLE])
        sides = {name: Side(**content[name]) for name in ("expected", "interrupted", "resumed")}
        return cls(**{**content, **sides})


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check of a comparison.

    Args:
        name: what was compared.
        compared: how much was compared, as text.
        differing: how much of it differs, as text; empty if everything agrees.
        worst: largest difference, as text; empty if there is none.
        skipped: why it was not compared; empty if it was.
    """

    name: str
    compared: str
    differing: str = ""
    worst: str = ""
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a comparison.

    Args:
        checks: in the order of the table.
        first: description of the first difference; empty if everything agrees.
        explanation: its cause or what to do; may be empty.
    """

    checks: tuple[Check, ...]
    first: str = ""
    explanation: str = ""

    def as_facts(self) -> dict[str, Any]:
        """Return the result as plain values for `from_facts`."""
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Read the values of `as_facts`; other keys are ignored."""
        checks = tuple(Check(**check) for check in facts["checks"])
        return cls(checks=checks, first=facts["first"], explanation=facts["explanation"])
