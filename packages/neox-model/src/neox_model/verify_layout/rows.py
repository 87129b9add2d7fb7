"""Numbers that say how a part of a tensor differs from the reference's."""

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from neox_model.checkpoint.blocks import Block

__all__ = ["KINDS", "LIMITS", "Limit", "Piece", "Place", "Row", "compare_values", "elements"]

# What is compared, in the order in which a fault shows.
KINDS = (
    *("initial weights", "loss", "gradients", "gradient norm"),
    *("optimizer states", "weights", "model states", "evaluation loss"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What is rounding in a data type.

    Args:
        error: the largest relative error.
        ratio: the largest distance from 1 of the projection on the reference: a factor that is closer to 1
            stays hidden.
        floor: the least share of all gradients, or updates, that the error of one tensor is relative to.
    """

    error: float
    ratio: float
    floor: float


# By the coarsest data type of the computation.
LIMITS = {
    "fp64": Limit(error=1e-10, ratio=1e-10, floor=1e-3),
    "fp32": Limit(error=2e-4, ratio=1e-4, floor=1e-3),
    "fp16": Limit(error=0.03, ratio=0.02, floor=0.05),
    "bf16": Limit(error=0.2, ratio=0.1, floor=0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank and its coordinates in the layout."""

    rank: int
    data: int
    tensor: int
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The comparison of one rank's part of a tensor, or of a number.

    Args:
        step: number of the update, from 1; 0 before the first.
        kind: one of KINDS.
        name: logical name.
        place: the rank.
        is_split: tensor-parallel ranks hold different parts.
        expected: 2-norm of the reference's values.
        found: 2-norm of this rank's values.
        product: inner product of both.
        difference: 2-norm of the difference.
        scale: what the difference is relative to.
    """

    step: int
    kind: str
    name: str
    place: Place
    is_split: bool
    expected: float
    found: float
    product: float
    difference: float
    scale: float

    @property
    def error(self) -> float:
        """The difference, relative to the scale; infinite if a value is not finite."""
        if not isfinite(self.difference):
            return float("inf")
        if not self.scale:
            return float("inf") if self.difference else 0.0
        return self.difference / self.scale

    def differs(self, limit: Limit) -> bool:
        """Return True if the difference is more than rounding."""
        # What is smaller than the scale has no ratio: it may be rounding alone.
        is_small = self.expected < self.scale or not self.expected
        return self.error > limit.error or (
            not is_small and abs(self.product / self.expected**2 - 1.0) > limit.ratio
        )

    @property
    def order(self) -> tuple[int, int]:
        """Place in the order in which a fault shows; a loss and its gradients have the same."""
        return self.step, KINDS.index("loss" if self.kind == "gradients" else self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part that differs, with its values.

    Args:
        row: the comparison.
        block: this rank's block of the tensor.
        start: first element, row-major in the block.
        values: the elements, float64, 1-D.
    """

    row: Row
    block: Block
    start: int
    values: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return the same elements of a whole tensor, float64, 1-D."""
        return elements(whole, self.block, self.start, self.values.numel())


def elements(whole: Tensor, block: Block, start: int, count: int) -> Tensor:
    """Return some elements of a block of a whole tensor, float64, 1-D; the first is at `start`, row-major."""
    return whole[tuple(slice(*bounds) for bounds in block)].reshape(-1)[start : start + count].double()


def compare_values(found: Tensor, expected: Tensor, *, scale: float, **about: Any) -> Row:
    """Compare a part of a tensor with the reference's.

    Args:
        found: the values, float64.
        expected: the reference's, of the same shape, float64.
        scale: what the difference is relative to.
        about: what a Row has besides.
    """
    return Row(
        expected=_norm(expected),
        found=_norm(found),
        product=float((found * expected).sum()),
        difference=_norm(found - expected),
        scale=scale,
        **about,
    )


def _norm(values: Tensor) -> float:
    return sqrt(float(torch.square(values).sum()))
