"""Schedules of compression in training: bits, shares and densities by iteration.

Iterations count from 0: a value is that of the forward passes of this iteration.
"""

from collections.abc import Mapping

__all__ = [
    "FEED_FORWARD_INPUTS",
    "GATED_MATRICES",
    "HEADS_MATRICES",
    "HEADS_OUTPUT",
    "LAYER_MATRICES",
    "PERIODS_PER_EIGENVALUE",
    "RELATED_MATRICES",
    "bits_at",
    "block_of",
    "density_at",
    "is_n_of_m",
    "quantized_share",
]

LAYER_MATRICES = ("attention.qkv", "attention.gate", "attention.dense", "mlp.up", "mlp.gate", "mlp.down")
"""The matrices of a transformer layer that can be compressed, by the end of their logical name."""

GATED_MATRICES = ("mlp.gate",)
"""Those that only layers with a gated activation have."""

HEADS_MATRICES = ("attention.qkv", "attention.gate", "attention.dense")
"""Those that only layers of attention over heads have."""

HEADS_OUTPUT = "attention.dense"
"""The matrix whose inputs are the outputs of the heads."""

FEED_FORWARD_INPUTS = ("mlp.up", "mlp.gate")
"""The matrices whose rows can be removed, together with columns of mlp.down."""

RELATED_MATRICES: Mapping[str, tuple[str, ...]] = {
    HEADS_OUTPUT: ("attention.qkv",),
    "mlp.up": ("mlp.gate", "mlp.down"),
    "mlp.gate": ("mlp.up", "mlp.down"),
}
"""Pruned matrix -> those that can lose rows or columns together with its heads or rows."""


PERIODS_PER_EIGENVALUE = 4
"""The period of bits of a layer with the largest eigenvalue is multiplied by one more than this."""


def bits_at(iteration: int, *, offset: int, start: int, target: int, period: int) -> int | None:
    """Return the number of bits of quantized weights; None before the offset.

    Every `period` iterations they are reduced by one, from `start` to `target`.
    """
    return None if iteration < offset else max(target, start - (iteration - offset) // period)


def quantized_share(since: int, ratio: float) -> float:
    """Return the share of quantized values in a mix with those of 16 bit.

    Args:
        since: iterations since the number of bits changed, 0 in the first one.
        ratio: share in the first iteration, and growth per iteration.
    """
    return min(1.0, ratio * (since + 1))


def density_at(iteration: int, *, start: int, end: int, stride: int, target: float) -> float | None:
    """Return the density that the pattern of snip_momentum gets in an iteration; None if it stays.

    From `start` to `end` the density falls exponentially to the target, in steps of `stride` iterations; the
    last step is the first one at `end` or after it.
    """
    steps = -(-(end - start) // stride)
    step, between = divmod(iteration - start, stride)
    if between or not 0 <= step <= steps:
        return None
    return float(target ** ((step + 1) / (steps + 1)))


def block_of(pattern: str) -> tuple[int, int]:
    """Return the two numbers of a block pattern, such as 4x1 or 2:4."""
    first, _, second = pattern.replace(":", "x").partition("x")
    return int(first), int(second)


def is_n_of_m(pattern: str) -> bool:
    """Return True for N:M, with at most N of M consecutive weights of a row; False for blocks."""
    return ":" in pattern
