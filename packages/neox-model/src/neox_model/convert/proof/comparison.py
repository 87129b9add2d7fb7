"""Compare results of two programs."""

import math
from collections.abc import Callable

from torch import Tensor

from neox_model.convert.errors import ProofError

__all__ = ["Figures"]

# Largest difference of float32 results, relative to the largest result.
_LIMIT = 1e-5
# What two programs may differ by, in roundings of one of them, and at most.
_ROUNDINGS, _MOST = 4, 1e-3


class Figures:
    """The largest difference of each comparison, relative to the largest value.

    Args:
        limit: what is considered rounding.
        other: what neox-model is compared with, for messages.
    """

    def __init__(self, limit: float = _LIMIT, *, other: str = "transformers") -> None:
        self.limit, self._other = limit, other
        self._largest: dict[str, float] = {}

    def compare(
        self,
        what: str,
        ours: Tensor,
        theirs: Tensor,
        *,
        where: str = "",
        exact: Callable[[], Tensor] | None = None,
        where_clear: Tensor | None = None,
    ) -> None:
        """Compare two results.

        Many layers with large scores of attention multiply the rounding of sums that are added in another
        order. Where our result in float64 is known, it shows by how much.

        Args:
            what: the kind of comparison, which is recorded.
            ours: our result.
            theirs: the other result.
            where: what exactly was compared, for messages.
            exact: returns our result, computed in float64.
            where_clear: what is compared of the first dimensions; None: all.
        """
        if ours.shape != theirs.shape:
            raise ProofError(
                f"{what}{where}: the shape is {tuple(ours.shape)} here and {tuple(theirs.shape)} there"
            )
        if where_clear is not None:
            ours, theirs = ours[where_clear], theirs[where_clear]
            if not ours.numel():
                raise ProofError(
                    f"{what}{where}: experts of all tokens have nearly equal scores, so that nothing can be "
                    "compared; this router is not trained"
                )
        scale, limit = float(theirs.abs().max()) or 1.0, self.limit
        difference = float((ours - theirs).abs().max()) / scale
        if not difference <= limit and exact is not None:
            rounding = (
                float((ours - (exact() if where_clear is None else exact()[where_clear])).abs().max()) / scale
            )
            self._add(f"{what}: rounding", rounding)
            limit = max(limit, min(_ROUNDINGS * rounding, _MOST))
        if not difference <= limit:
            found = f"{difference:.3g}" if math.isfinite(difference) else "not a finite number"
            raise ProofError(
                f"{what}{where}: the results of neox-model and {self._other} differ by {found} of the "
                f"largest, more than {limit:.3g}; this is not the same model"
            )
        self._add(what, difference)

    def _add(self, what: str, figure: float) -> None:
        self._largest[what] = max(self._largest.get(what, 0.0), figure)

    def plain(self) -> dict[str, float]:
        """Return the largest difference by kind, and the rounding where it was measured."""
        return dict(self._largest)
