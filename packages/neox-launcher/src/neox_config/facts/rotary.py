"""Facts about scaled rotary frequencies."""

import math

__all__ = ["yarn_attention_factor"]


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the number that multiplies sines and cosines. Source: arXiv:2309.00071, section 3.4."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
