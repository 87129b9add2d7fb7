"""Compare two tensors of different dtypes: which of them is the other rounded, and what that changed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from neox_config.pluralize import pluralize

__all__ = ["PIECE", "Comparison", "Roundings", "compare_values"]

PIECE = 2**20
"""Elements that are compared at once: each takes up to five times eight bytes meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was seen in two tensors of one shape.

    Args:
        dtypes: of the first and the second.
        values: elements.
        apart: elements whose values differ.
        largest: largest difference.
        rounded: 0 or 1, the one that is the other rounded to its dtype; None if neither is.
    """

    dtypes: tuple[torch.dtype, torch.dtype]
    values: int
    apart: int
    largest: float
    rounded: int | None

    @property
    def is_same(self) -> bool:
        """Return whether the values are the same, or one tensor is the other rounded."""
        return not self.apart or self.rounded is not None

    def why(self, names: tuple[str, str]) -> str:
        """Return what the dtypes have to do with a difference; empty if they are the same."""
        one, other = map(_name, self.dtypes)
        if one == other:
            return ""
        which = "neither" if self.rounded is None else names[self.rounded]
        return f" ({names[0]} is {one} and {names[1]} {other}; {which} is the other rounded)"


def compare_values(
    pairs: Iterable[tuple[Tensor, Tensor]], dtypes: tuple[torch.dtype, torch.dtype]
) -> Comparison:
    """Compare two tensors, some rows at a time.

    Args:
        pairs: parts of both, of any size.
        dtypes: of both.
    """
    values, count, largest, could_be = 0, 0, 0.0, [dtypes[0] != dtypes[1]] * 2
    both = torch.promote_types(*dtypes)  # It holds every value of the two.
    for pair in _pieces(pairs):
        values += pair[0].numel()
        one, other = (each.to(both) for each in pair)
        apart = one != other
        if bool(apart.any()):
            count += int(apart.sum())
            largest = max(
                largest, float((one.double() - other.double()).abs().nan_to_num(float("inf")).max())
            )
            # Only where they differ, so that the result does not depend on the division into pieces.
            are_finite = bool((one.isfinite() & other.isfinite() | ~apart).all())
            for side in (0, 1):
                is_rounded = bool((pair[1 - side].to(dtypes[side]) == pair[side]).all())
                could_be[side] = could_be[side] and is_rounded and are_finite
    rounded = next((side for side in (1, 0) if could_be[side]), None) if count else None
    return Comparison(dtypes=dtypes, values=values, apart=count, largest=largest, rounded=rounded)


def _pieces(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of some rows of both tensors of each pair."""
    for one, other in pairs:
        rows = max(1, PIECE // max(1, prod(one.shape[1:])))
        yield from zip(torch.atleast_1d(one).split(rows), torch.atleast_1d(other).split(rows), strict=True)


class Roundings:
    """Counts the tensors of two models of which one is the other rounded.

    Args:
        names: of the two models, for messages.
    """

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names
        self._counts: dict[tuple[int, torch.dtype, torch.dtype], list[int]] = {}

    def add(self, found: Comparison) -> None:
        """Count a tensor, if it is rounded."""
        if found.rounded is not None:
            counts = self._counts.setdefault((found.rounded, *found.dtypes), [0, 0, 0])
            for place, count in enumerate((1, found.apart, found.values)):
                counts[place] += count

    def described(self) -> list[str]:
        """Return a sentence for each pair of dtypes."""
        found = []
        for (side, *dtypes), (tensors, changed, values) in self._counts.items():
            other = 1 - side
            of_side = f"of {self._names[side]} ({_name(dtypes[side])})"
            found.append(
                f"{pluralize(tensors, f'tensor {of_side} is that', f'tensors {of_side} are those')} of "
                f"{self._names[other]} ({_name(dtypes[other])}) rounded: {changed:,} of {values:,} values "
                "lost precision"
            )
        return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
