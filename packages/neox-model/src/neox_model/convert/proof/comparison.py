"""Compare results of two programs."""

import math

from torch import Tensor

from neox_model.convert.errors import ProofError

__all__ = ["LIMIT", "Figures"]

LIMIT = 1e-5
"""Largest difference of float32 results, relative to the largest result."""


class Figures:
    """The largest difference of each comparison, relative to the largest value.

    Args:
        limit: what is considered rounding.
        other: what neox-model is compared with, for messages.
    """

    def __init__(self, limit: float = LIMIT, *, other: str = "transformers") -> None:
        self.limit, self._other = limit, other
        self._largest: dict[str, float] = {}

    def compare(self, what: str, ours: Tensor, theirs: Tensor, *, where: str = "") -> None:
        """Compare two results.

        Args:
            what: the kind of comparison, which is recorded.
            ours: our result.
            theirs: the other result.
            where: what exactly was compared, for messages.

        Raises:
            ProofError: they differ by more than the limit.
        """
        if ours.shape != theirs.shape:
            raise ProofError(
                f"{what}{where}: the shape is {tuple(ours.shape)} here and {tuple(theirs.shape)} there"
            )
        scale = float(theirs.abs().max())
        difference = float((ours - theirs).abs().max()) / (scale or 1.0)
        if not difference <= self.limit:
            found = f"{difference:.3g}" if math.isfinite(difference) else "not a finite number"
            raise ProofError(
                f"{what}{where}: the results of neox-model and {self._other} differ by {found} of the "
                f"largest, more than {self.limit:g}; this is not the same model"
            )
        self._largest[what] = max(self._largest.get(what, 0.0), difference)

    def plain(self) -> dict[str, float]:
        """Return the largest difference by kind."""
        return dict(self._largest)
