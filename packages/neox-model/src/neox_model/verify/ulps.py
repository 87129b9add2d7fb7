"""Measure the difference between two tensors that are read in chunks."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["Distance", "distance_of"]

# Integer dtype with the bits of a floating-point number, by its bytes.
_BITS: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32, 8: torch.int64}

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
        self._norm = self._norm_a = self._norm_b = 0.0

    @property
    def relative_norm(self) -> float:
        """The 2-norm of the difference, relative to the larger 2-norm of the finite values of the two."""
        if not math.isfinite(self._norm):
            return math.inf
        return self._norm / max(self._norm_a, self._norm_b) if self._norm else 0.0

    def __str__(self) -> str:
        return (
            f"{self.differing:,} of {self.numel:,} elements differ, by at most {self.ulps:,.0f} ulp, "
            f"relative norm {self.relative_norm:.2e}"
        )

    def add(self, one: Tensor, other: Tensor) -> None:
        """Add the next values, flat, of the same number."""
        self.numel += one.numel()
        for here, there in zip(one.split(_SLICE), other.split(_SLICE), strict=True):
            a, b = (each.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for each in (here, there))
            self._norm_a = math.hypot(self._norm_a, _norm(a))
            self._norm_b = math.hypot(self._norm_b, _norm(b))
            differing = ~_is_same(here, there)
            count = int(differing.sum())
            if count:
                self.differing += count
                apart = here[differing].double() - there[differing].double()
                self._norm = math.hypot(self._norm, _norm(apart))
                self.ulps = max(self.ulps, _ulps(here[differing], there[differing]))


def distance_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> Distance:
    """Return the difference between two tensors, given their chunks."""
    distance = Distance()
    for one, other in pairs:
        distance.add(one, other)
    return distance


def _is_same(expected: Tensor, found: Tensor) -> Tensor:
    """Compare elementwise: all bits if the dtypes are the same, else values."""
    if expected.dtype != found.dtype:
        return expected.double() == found.double()
    if not expected.is_floating_point():
        return expected == found
    bits = _BITS[expected.element_size()]
    return expected.view(bits) == found.view(bits)


def _norm(values: Tensor) -> float:
    """Return the 2-norm; squares of very large and very small numbers are not in the range of float64."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(values / largest))


def _ulps(one: Tensor, other: Tensor) -> float:
    """Return the largest distance in ulp; for integers, the largest difference; inf if one is not finite."""
    if not _are_finite(one, other):
        return math.inf
    if not (one.is_floating_point() or other.is_floating_point()):
        return _farthest(one.to(torch.int64), other.to(torch.int64))
    if not (one.is_floating_point() and other.is_floating_point()):
        return float((one.double() - other.double()).abs().max())
    coarser = max((one.dtype, other.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    one, other = one.to(coarser), other.to(coarser)
    # The coarser one may have the smaller range.
    return _farthest(_rank(one), _rank(other)) if _are_finite(one, other) else math.inf


def _are_finite(*tensors: Tensor) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors)


def _farthest(one: Tensor, other: Tensor) -> float:
    """Return the largest distance between integers; of opposite signs, it may not fit into an integer."""
    has_one_sign = (one < 0) == (other < 0)
    apart = torch.where(has_one_sign, (one - other).abs().double(), one.double().abs() + other.double().abs())
    return float(apart.max())


def _rank(values: Tensor) -> Tensor:
    """Return the place of each number among all numbers of the dtype, counted from zero."""
    dtype = _BITS[values.element_size()]
    bits = values.view(dtype).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(dtype).min - bits, bits)
