"""Relative positions: a bias of attention scores by the distance between query and key.

A relative position is `position(distance_R) -> bias_NR`, float32: for each head of this rank, the bias of
keys that are that many positions before the query; negative distances are those of later keys. It requires no
tensor of size sequence x sequence.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from neox_kernels.precision import widen
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod, logical_parameter

__all__ = ["AlibiPosition", "BucketPosition", "alibi_slopes", "distance_buckets"]


def distance_buckets(
    distance_R: Tensor, num_buckets: int, max_distance: int, *, both_ways: bool = False
) -> Tensor:
    """Return the bucket of distances: one per near distance, logarithmic for far distances.

    Args:
        distance_R: distances, int64, negative to later keys.
        num_buckets: number of buckets; the first half is for single distances.
        max_distance: distances from this one on are in the last bucket.
        both_ways: the second half of the buckets is for later keys, the first for all others; False: later
            keys have the bucket of distance 0.

    Returns:
        int64 [R].

    Source: arXiv:1910.10683 (T5), the form of decoders, and with `both_ways` that of encoders.
    """
    if both_ways:
        side = num_buckets // 2
        return _one_way(distance_R.abs(), side, max_distance) + side * (distance_R < 0)
    return _one_way(distance_R.clamp(min=0), num_buckets, max_distance)


def _one_way(distance_R: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    exact = num_buckets // 2
    ratio = distance_R.clamp(min=1).float() / exact
    step = torch.log(ratio) / math.log(max_distance / exact) * (num_buckets - exact)
    far = (exact + step.trunc().long()).clamp(max=num_buckets - 1)
    return torch.where(distance_R < exact, distance_R, far)


class BucketPosition(nn.Module):
    """A learned bias per distance bucket and head, times the square root of the head width.

    Args:
        num_buckets: number of buckets.
        max_distance: distances from this one on share the last bucket.
        heads: heads of the whole layer.
        head_width: channels of a head.
        init: fills the whole weight.
        both_ways: later keys have buckets of their own.
        group: the ranks over which the heads are split.

    Source: arXiv:1910.10683 (T5).
    """

    def __init__(
        self,
        *,
        num_buckets: int,
        max_distance: int,
        heads: int,
        head_width: int,
        init: InitMethod,
        both_ways: bool = False,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.num_buckets = num_buckets
        self.both_ways = both_ways
        self.max_distance = max_distance
        self.factor = math.sqrt(head_width)
        self.weight = logical_parameter((num_buckets, heads), init=init, group=group, split_dim=1)

    def forward(self, distance_R: Tensor) -> Tensor:
        """Return bias_NR by distance."""
        buckets_R = distance_buckets(
            distance_R, self.num_buckets, self.max_distance, both_ways=self.both_ways
        )
        return widen(self.weight.t())[:, buckets_R] * self.factor


def alibi_slopes(heads: int) -> Sequence[float]:
    """Return every head's slope: a geometric series, with more from that of the next power of two if needed.

    Source: arXiv:2108.12409, and the authors' code for other numbers of heads.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (place + 1) / power) for place in range(power)]
    between = [2.0 ** (-4.0 * (place + 1) / power) for place in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]


class AlibiPosition(nn.Module):
    """A bias of minus the head's slope times the distance, in either direction, without parameters.

    Args:
        heads: heads of the whole layer.
        group: the ranks over which the heads are split.

    Source: arXiv:2108.12409.
    """

    def __init__(self, *, heads: int, group: Group = SINGLE_RANK) -> None:
        super().__init__()
        local_heads = heads // group.size
        first = group.rank * local_heads
        self.slopes = tuple(alibi_slopes(heads)[first : first + local_heads])

    def forward(self, distance_R: Tensor) -> Tensor:
        """Return bias_NR by distance."""
        slope_N1 = torch.tensor(self.slopes, dtype=torch.float32, device=distance_R.device).unsqueeze(1)
        return -slope_N1 * distance_R.abs().float()
