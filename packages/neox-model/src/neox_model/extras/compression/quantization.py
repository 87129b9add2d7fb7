"""Quantization of weights and inputs of matrices in training, with straight-through gradients.

Values are rounded to the levels of a few bits and stay floating-point numbers. A gradient passes as if
nothing was rounded. Scales are those of the whole matrix, of the whole token or of the whole batch, wherever
its parts are, so that every layout rounds alike.

Sources: arXiv:2206.01861 (ZeroQuant), arXiv:1602.02830 (one bit), arXiv:1605.04711 (two bits).
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from neox_kernels.philox import philox
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import Group

__all__ = [
    "InputQuantizer",
    "Rounding",
    "WeightQuantizer",
    "quantize_inputs",
    "straight_through",
    "uniform_noise",
]

_MOST = distributed.ReduceOp.MAX
_LOW = 2**32 - 1
# Weight of the past in running ranges of inputs.
_MOMENTUM = 0.95
# Threshold of two-bit weights, as a multiple of the mean magnitude.
_TERNARY = 0.7


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the gradient of `exact`."""
    result: Tensor = _StraightThrough.apply(exact, rounded)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How values become levels.

    Args:
        kind: symmetric: levels are multiples of a step; asymmetric: they start at the smallest value.
        is_stochastic: round up or down at random, with the exact value as the mean.
    """

    kind: Literal["symmetric", "asymmetric"]
    is_stochastic: bool = False


class WeightQuantizer(nn.Module):
    """Rounds this rank's block of a matrix.

    The whole matrix, in row-major order, is divided into groups of equal size, each with its own scale:

        symmetric:   s = 2 max|w| / 2^b,         w' = s clamp(round(w / s), -2^(b-1), 2^(b-1) - 1)
        asymmetric:  s = (max w - min w) / 2^b,  z = s round(min w / s),
                     w' = s clamp(round((w - z) / s), 0, 2^b - 1) + z
        symmetric, two bits:  w' = sign(w) a if |w| > t, else 0;  t = 0.7 mean|w|, a = mean of |w| above t
        symmetric, one bit:   w' = sign(w) mean|w|

    Args:
        name: logical name of the matrix; selects the noise of stochastic rounding.
        shape: shape of the whole matrix.
        slices: the block that this rank holds.
        group: the ranks that hold the other blocks.
        groups: number of groups.
        rounding: how values become levels.
        in_forward: quantize in the forward pass; False: the weights are quantized before.
        seed: random seed.

    Attributes:
        bits: number of bits; None: weights pass unchanged.
        share: share of rounded values in the mix with exact ones.
        iteration: selects the noise of stochastic rounding.
        group_size: number of weights with one scale.
    """

    def __init__(
        self,
        name: str,
        *,
        shape: tuple[int, int],
        slices: tuple[tuple[int, int], tuple[int, int]],
        group: Group,
        groups: int,
        rounding: Rounding,
        in_forward: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.name = name
        self.in_forward = in_forward
        self.bits: int | None = None
        self.share = 1.0
        self.iteration = 0
        self._slices, self._columns = slices, shape[1]
        self._group, self._count = group, groups
        self.group_size = shape[0] * shape[1] // groups
        self._rounding, self._seed = rounding, seed
        (_, _), (first, stop) = slices
        # The largest runs that are in one group each.
        self._run = math.gcd(self.group_size, stop - first)

    @property
    def is_symmetric(self) -> bool:
        """Return True if the levels are multiples of a step."""
        return self._rounding.kind == "symmetric"

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weights of the forward pass, given the block in any floating-point dtype."""
        if self.bits is None or not self.in_forward:
            return weight
        return straight_through(weight, self.rounded(weight))

    @torch.no_grad()
    def rounded(self, weight: Tensor) -> Tensor:
        """Return the block with rounded values, mixed with exact ones by `share`; no gradient."""
        if self.bits is None:
            return weight
        exact = _wide(weight)
        runs = exact.view(exact.shape[0], -1, self._run)
        rounded = self._rounded_runs(runs, self.bits).view_as(exact)
        if self.share < 1.0:
            rounded = exact + self.share * (rounded - exact)
        return rounded.to(weight.dtype)

    @torch.no_grad()
    def levels(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole numbers and the steps, of the block's shape, whose products are rounded weights.

        Rounding must be symmetric. The numbers have `bits` bits, and those of one bit are -1, 0 and 1.
        """
        assert self.bits is not None, "the weights are not quantized yet"
        exact = _wide(weight)
        runs = exact.view(exact.shape[0], -1, self._run)
        steps = _nonzero(self._steps(runs, self.bits)).expand_as(runs)
        numbers = (self._rounded_runs(runs, self.bits) / steps).round()
        return numbers.view_as(exact), steps.reshape(exact.shape)

    def _rounded_runs(self, runs: Tensor, bits: int) -> Tensor:
        if self._rounding.kind == "asymmetric":
            ids = self._group_ids(runs.device)
            low, high = runs.aminmax(dim=-1)
            low, high = -self._largest(-low, ids)[ids], self._largest(high, ids)[ids]
            return _asymmetric(runs, low.unsqueeze(-1), high.unsqueeze(-1), bits, self._noise(runs))
        steps = self._steps(runs, bits)
        if bits == 1:
            return runs.sign() * steps
        if bits == 2:
            return torch.where(self._is_above(runs), runs.sign() * steps, 0.0)
        return _symmetric(runs, steps, bits, self._noise(runs))

    def _steps(self, runs: Tensor, bits: int) -> Tensor:
        """Return the step between symmetric levels of each run, (rows, runs, 1)."""
        ids, size = self._group_ids(runs.device), runs.abs()
        if bits == 1:
            found = self._mean(size, ids)
        elif bits == 2:
            is_above = self._is_above(runs)
            total = self._sum(torch.where(is_above, size, 0.0).sum(dim=-1, dtype=torch.float64), ids)
            count = self._sum(is_above.sum(dim=-1, dtype=torch.float64), ids)
            found = total / count.clamp(min=1.0)
        else:
            found = _step(self._largest(size.amax(dim=-1), ids), bits)
        return found[ids].unsqueeze(-1).to(runs.dtype)

    def _is_above(self, runs: Tensor) -> Tensor:
        """Return the weights that two bits do not round to 0."""
        ids, size = self._group_ids(runs.device), runs.abs()
        return size > _TERNARY * self._mean(size, ids)[ids].unsqueeze(-1)

    def _group_ids(self, device: torch.device) -> Tensor:
        """Return the number of the group of each run, by row."""
        (top, bottom), (first, stop) = self._slices
        starts = torch.arange(first, stop, self._run, device=device)
        rows = torch.arange(top, bottom, device=device)
        return (rows[:, None] * self._columns + starts) // self.group_size

    def _largest(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return the largest value of each group over all ranks, given that of each run."""
        found = values.new_full((self._count,), -torch.inf)
        found.scatter_reduce_(0, ids.flatten(), values.flatten(), "amax")
        return all_reduce(found, self._group, _MOST)

    def _sum(self, values: Tensor, ids: Tensor) -> Tensor:
        found = values.new_zeros(self._count).index_add_(0, ids.flatten(), values.flatten())
        return all_reduce(found, self._group)

    def _mean(self, values: Tensor, ids: Tensor) -> Tensor:
        return self._sum(values.sum(dim=-1, dtype=torch.float64), ids) / self.group_size

    def _noise(self, runs: Tensor) -> Tensor | None:
        if not self._rounding.is_stochastic:
            return None
        (top, bottom), (first, stop) = self._slices
        rows = torch.arange(top, bottom, device=runs.device)
        places = rows[:, None] * self._columns + torch.arange(first, stop, device=runs.device)
        noise = uniform_noise(places, f"{self._seed}/{self.name}/{self.iteration}")
        return noise.view_as(runs).to(runs.dtype)


def uniform_noise(places: Tensor, key: str) -> Tensor:
    """Return a float32 number in [0, 1) for each place, an int64, that depends on the key and the place."""
    digest = hashlib.sha256(key.encode()).digest()
    words = [torch.tensor(int.from_bytes(digest[at : at + 4], "big"), device=places.device) for at in (0, 4)]
    zero = torch.zeros_like(places)
    bits, *_ = philox((places & _LOW, places >> 32, zero, zero), (words[0], words[1]))
    # 24 bits are what float32 holds exactly.
    return (bits >> 8).to(torch.float32) / 2**24


class InputQuantizer(nn.Module):
    """Rounds the inputs of a matrix.

    With dynamic ranges, each token has its own. A static range is that of all tokens: a running average,
    over iterations, of the smallest and the largest input of an iteration's batch. It starts with the first
    batch that is seen.

    Args:
        bits: number of bits.
        rounding: how values become levels.
        is_dynamic: each token has its own range.
        group: the ranks that hold the other parts of a token; of one rank if each has whole tokens.

    Attributes:
        is_on: round; False: only observe.
        range: smallest and largest input, a float32 pair; equal until a batch was observed.
        seen: smallest input, negated, and largest input of the present iteration on this rank.
    """

    range: Tensor
    seen: Tensor

    def __init__(self, bits: int, rounding: Rounding, *, is_dynamic: bool, group: Group) -> None:
        super().__init__()
        self.bits = bits
        self.is_dynamic = is_dynamic
        self.is_on = False
        self._rounding, self._group = rounding, group
        self.register_buffer("range", torch.zeros(2), persistent=False)
        self.register_buffer("seen", torch.full((2,), -torch.inf), persistent=False)

    def _apply(self, *arguments: Any, **options: Any) -> "InputQuantizer":
        """Move the ranges to another device; a model in 16 bit has them in float32, too."""
        super()._apply(*arguments, **options)
        self.range, self.seen = _wide(self.range), _wide(self.seen)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the rounded inputs (tokens, ..., width)."""
        if self.training and not self.is_dynamic:
            with torch.no_grad():
                low, high = inputs.detach().aminmax()
                torch.maximum(self.seen, torch.stack([-low, high]).to(self.seen), out=self.seen)
        if not self.is_on:
            return inputs
        with torch.no_grad():
            exact = _wide(inputs.detach())
            if self.is_dynamic:
                low, high = exact.aminmax(dim=-1, keepdim=True)
                low, high = all_reduce(torch.stack([-low, high]), self._group, _MOST).unbind()
                low = -low
            else:
                low, high = self.range.to(exact).unbind()
            rounded = quantize_inputs(exact, low, high, self.bits, self._rounding.kind)
            if not self.is_dynamic:
                # Before any batch was observed there is no range.
                rounded = torch.where(self.has_range, rounded, exact)
        return straight_through(inputs, rounded.to(inputs.dtype))

    @property
    def has_range(self) -> Tensor:
        """Return True, on the device, if a batch was observed."""
        return self.range[0] != self.range[1]

    def update_range(self, seen: Tensor) -> None:
        """Add an iteration's range to the running average.

        Args:
            seen: smallest input, negated, and largest input of the batch over all ranks; not finite if no
                batch was observed, or an input was not finite.
        """
        new = torch.stack([-seen[0], seen[1]])
        mean = torch.where(self.has_range, _MOMENTUM * self.range + (1 - _MOMENTUM) * new, new)
        self.range.copy_(torch.where(new.isfinite().all(), mean, self.range))
        self.seen.fill_(-torch.inf)


def quantize_inputs(
    exact: Tensor, low: Tensor, high: Tensor, bits: int, kind: Literal["symmetric", "asymmetric"]
) -> Tensor:
    """Return inputs rounded to the nearest levels of a range, by the formulas of `WeightQuantizer`."""
    if kind == "asymmetric":
        return _asymmetric(exact, low, high, bits, None)
    return _symmetric(exact, _step(torch.maximum(low.abs(), high.abs()), bits), bits, None)


def _step(most: Tensor, bits: int) -> Tensor:
    return 2 * most / 2**bits


def _symmetric(values: Tensor, step: Tensor, bits: int, noise: Tensor | None) -> Tensor:
    step = _nonzero(step)
    return step * _round(values / step, noise).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _asymmetric(values: Tensor, low: Tensor, high: Tensor, bits: int, noise: Tensor | None) -> Tensor:
    step = _nonzero((high - low) / 2**bits)
    zero = step * (low / step).round()
    rounded = step * _round((values - zero) / step, noise).clamp(0, 2**bits - 1) + zero
    return torch.where(high == low, values, rounded)


def _round(values: Tensor, noise: Tensor | None) -> Tensor:
    return values.round() if noise is None else (values + noise).floor()


def _nonzero(step: Tensor) -> Tensor:
    return torch.where(step == 0, 1.0, step)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
