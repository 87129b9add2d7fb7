"""Widths of matrices that tensor cores multiply fast."""

__all__ = ["ALIGNED", "BEST_ALIGNED", "next_aligned"]

ALIGNED = 8
"""Numbers of 16 bits in 16 bytes, the unit in which GPUs load the rows of a matrix."""
BEST_ALIGNED = 64
"""Numbers in the part of a row that kernels of matrix products load at once."""
_MOST_ADDED = 1 / 20


def next_aligned(width: int, *, ranks: int = 1) -> int:
    """Return the next width whose part on each rank is a multiple of 64.

    Where that adds more than a twentieth, the multiple is 32, 16 or 8.

    Args:
        width: of the whole matrix.
        ranks: number of tensor-parallel ranks that divide it.
    """
    found = [-(-width // (each * ranks)) * each * ranks for each in (BEST_ALIGNED, 32, 16, ALIGNED)]
    return next((each for each in found if each <= (1 + _MOST_ADDED) * width), found[-1])
