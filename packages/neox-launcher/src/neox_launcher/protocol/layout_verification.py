"""The request of `verify-layout` to its workers, and their answer."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

__all__ = ["Finding", "LayoutAnswer", "LayoutRequest", "Part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """Request to train on a layout and in one process, in the current folder, and to compare.

    Args:
        reference: the configuration of one process, encoded.
        in_float64: compute in float64 instead of the configuration's precision.
        dropping: the configuration with its dropout, encoded, whose random numbers are compared; None if it
            has none. The comparison itself is without dropout.
    """

    reference: str
    in_float64: bool
    dropping: str | None

    VARIABLE: ClassVar[str] = "NEOX_VERIFY_LAYOUT"

    def as_variables(self) -> dict[str, str]:
        """Return the environment variables for the workers."""
        return {self.VARIABLE: json.dumps(asdict(self), allow_nan=False)}

    @classmethod
    def from_environment(cls) -> Self:
        """Read the request to this worker.

        Raises:
            KeyError: there is no request.
        """
        return cls(**json.loads(os.environ[cls.VARIABLE]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One row of the table.

    Args:
        name: what was compared.
        compared: number of comparisons.
        differing: how many of them differ.
        worst: the largest relative difference.
        limit: the largest difference that is rounding.
    """

    name: str
    compared: int
    differing: int
    worst: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference, and what it means.

    Args:
        what: the tensor or number, and where it differs.
        meaning: the kind of fault, as far as its values show.
    """

    what: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAnswer:
    """Result of the comparison.

    Args:
        parts: the rows of the table.
        findings: the differences that come first, and what they mean; empty if everything agrees.
    """

    parts: tuple[Part, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def agrees(self) -> bool:
        """Return True if nothing differs."""
        return not self.findings and not any(part.differing for part in self.parts)

    def as_facts(self) -> dict[str, Any]:
        """Return the result as plain values for `from_facts`."""
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Read the values of `as_facts`; other keys are ignored."""
        return cls(
            parts=tuple(Part(**part) for part in facts["parts"]),
            findings=tuple(Finding(**finding) for finding in facts["findings"]),
        )
