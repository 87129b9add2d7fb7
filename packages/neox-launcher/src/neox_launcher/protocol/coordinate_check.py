"""The request of `coord-check` to its worker, and its answer."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

__all__ = ["CoordinateRequest", "Growth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateRequest:
    """Request to train copies of a model of several widths, and to measure their activations.

    Args:
        copies: encoded configurations by width, of each parametrization.
        page: HTML file to write.
    """

    copies: Mapping[str, Mapping[int, str]]
    page: str

    VARIABLE: ClassVar[str] = "NEOX_COORD_CHECK"

    def as_variables(self) -> dict[str, str]:
        """Return the environment variables for the worker."""
        return {self.VARIABLE: json.dumps(asdict(self), allow_nan=False)}

    @classmethod
    def from_environment(cls) -> Self:
        """Read the request to this worker.

        Raises:
            KeyError: there is no request.
        """
        values: dict[str, Any] = json.loads(os.environ[cls.VARIABLE])
        copies = {
            name: {int(width): text for width, text in of_width.items()}
            for name, of_width in values.pop("copies").items()
        }
        return cls(copies=copies, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How the activations of one kind of layer grow with width, in one parametrization.

    Args:
        parametrization: a key of `CoordinateRequest.copies`.
        kind: the kind of layer.
        changes: by width, mean absolute change of activations by the updates.
        slope: of the logarithm of the change by that of the width; None if a change is 0.
        is_hidden: its width grows, so that the slope should be 0.
    """

    parametrization: str
    kind: str
    changes: Mapping[str, float]
    slope: float | None
    is_hidden: bool
