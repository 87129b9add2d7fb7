"""The gradient noise scale: an estimate of the largest batch size that still saves training steps.

Source: McCandlish et al., An Empirical Model of Large-Batch Training (arXiv:1812.06162), appendix A.1.
"""

from dataclasses import dataclass

__all__ = ["AveragedNoiseScale", "NoiseScale", "estimate"]

_DECAY = 0.99


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """Unbiased estimates, whose ratio is the simple noise scale, in samples. A single one may be negative.

    Attributes:
        noise: trace of the covariance of the gradient of one sample.
        signal: squared norm of the expected gradient.
    """

    noise: float
    signal: float


def estimate(*, small: int, small_square: float, large: int, large_square: float) -> NoiseScale:
    """Estimate both from the squared norms of mean gradients of two batch sizes.

    Args:
        small: number of samples of the smaller batch.
        small_square: squared norm of its gradient, or the mean over several such batches.
        large: number of samples of the larger batch.
        large_square: squared norm of its gradient.
    """
    return NoiseScale(
        noise=(small_square - large_square) / (1 / small - 1 / large),
        signal=(large * large_square - small * small_square) / (large - small),
    )


class AveragedNoiseScale:
    """Exponential moving averages of both estimates; the ratio of single ones would be biased and noisy."""

    def __init__(self) -> None:
        self._noise = self._signal = self._weight = 0.0

    def add(self, found: NoiseScale) -> NoiseScale:
        """Add an estimate; return the averages."""
        self._noise = _DECAY * self._noise + (1 - _DECAY) * found.noise
        self._signal = _DECAY * self._signal + (1 - _DECAY) * found.signal
        self._weight = _DECAY * self._weight + (1 - _DECAY)
        return NoiseScale(self._noise / self._weight, self._signal / self._weight)
