"""Facts about scaled rotary frequencies."""

import math

__all__ = ["longrope_attention_factor", "yarn_attention_factor"]


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the number that multiplies sines and cosines. Source: arXiv:2309.00071, section 3.4."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(length: float, original: int) -> float:
    """Return the number that multiplies sines and cosines. Source: arXiv:2402.13753, and Phi-3.

    Args:
        length: the longest sequence.
        original: that of the earlier training.
    """
    return math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
