"""Measure the difference between two tensors that are read in chunks."""

import math

import torch
from torch import Tensor

__all__ = ["Distance"]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Limits the memory for values in float64.
_SLICE = 2**20


class Distance:
    """Accumulates the difference between the tensors A and B.

    An ulp is the distance between neighbouring numbers of the dtype, of the coarser one if they differ: the
    number of representable numbers from one value to the other. Two zeros of different sign are 0 apart.
    """

    def __init__(self) -> None:
        self.numel = self.differing = 0
        self.ulps = 0.0
        self._squares = self._squares_a = self._squares_b = 0.0

    @property
    def relative_norm(self) -> float:
        """The 2-norm of the difference, relative to the larger 2-norm of the two."""
        if math.isnan(self._squares) or math.isinf(self._squares):
            return math.inf
        largest = max(self._squares_a, self._squares_b)
        return math.sqrt(self._squares / largest) if self._squares else 0.0

    def add(self, one: Tensor, other: Tensor) -> None:
        """Add the next values, flat, of the same number."""
        self.numel += one.numel()
        for a, b in zip(one.split(_SLICE), other.split(_SLICE), strict=True):
            self._add(a, b)

    def _add(self, one: Tensor, other: Tensor) -> None:
        differing = ~_same(one, other)
        count = int(differing.sum())
        self.differing += count
        a, b = one.double(), other.double()
        self._squares_a += float(a.square().sum())
        self._squares_b += float(b.square().sum())
        if count:
            self._squares += float((a[differing] - b[differing]).square().sum())
            self.ulps = max(self.ulps, _ulps(one[differing], other[differing]))


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Compare elementwise: all bits if the dtypes are the same, else values."""
    if one.dtype != other.dtype:
        return one.double() == other.double()
    if not one.is_floating_point():
        return one == other
    bits = _BITS[one.element_size()]
    return one.view(bits) == other.view(bits)


def _ulps(one: Tensor, other: Tensor) -> float:
    """Return the largest distance in ulp; for integers, the largest difference; inf if one is not finite."""
    if not (one.is_floating_point() and other.is_floating_point()):
        return float((one.double() - other.double()).abs().max())
    if not bool((one.isfinite() & other.isfinite()).all()):
        return math.inf
    coarser = max((one.dtype, other.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    a, b = _rank(one.to(coarser)), _rank(other.to(coarser))
    # Of opposite signs, the distance may not fit into an integer.
    apart = torch.where((a < 0) == (b < 0), (a - b).abs().double(), a.double().abs() + b.double().abs())
    return float(apart.max())


def _rank(values: Tensor) -> Tensor:
    """Return the place of each number among all numbers of the dtype, counted from zero."""
    dtype = _BITS[values.element_size()]
    bits = values.view(dtype).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(dtype).min - bits, bits)
