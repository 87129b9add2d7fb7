"""The losses of the last applied updates, on the device, and the limit above which a loss is a spike."""

from collections.abc import Sequence

import torch
from torch import Tensor

from neox_config.facts.spikes import DEVIATIONS_PER_MAD, LEAST_DEVIATION

__all__ = ["RecentLosses", "is_spike"]


class RecentLosses:
    """A window over the losses of applied updates. Nothing is read back from the device except to save it.

    Args:
        count: number of losses.
        device: device of the losses.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        # NaN: not known yet.
        self._losses = torch.full((count,), torch.nan, dtype=torch.float32, device=device)

    def limit(self, threshold: float) -> Tensor:
        """Return the limit above which a loss is a spike; infinite until the window is full.

        The limit is M + threshold * max(1.4826 * D, 0.001 * |M|): M is the median of the losses, D the median
        of their distances from M. Unlike mean and standard deviation, both hardly change if the window
        contains a spike. If the number of losses is even, the median is the lower of the two in the middle.

        Args:
            threshold: distance of the limit from the median, in deviations.
        """
        median = self._losses.median()
        deviation = DEVIATIONS_PER_MAD * (self._losses - median).abs().median()
        limit = median + threshold * deviation.maximum(LEAST_DEVIATION * median.abs())
        return torch.where(limit.isnan(), torch.inf, limit)

    def add(self, loss: Tensor, *, is_applied: Tensor | bool) -> None:
        """Add the loss of an update, if it was applied and the loss is finite; the oldest one is dropped."""
        newest = loss.detach().to(self._losses).reshape(1)
        shifted = torch.cat([self._losses[1:], newest])
        self._losses = torch.where(newest.isfinite() & is_applied, shifted, self._losses)

    def values(self) -> list[float]:
        """Return the losses that are known, the oldest first; waits for the device."""
        return [loss for loss in self._losses.tolist() if loss == loss]

    def load(self, values: Sequence[float]) -> None:
        """Continue with the losses of `values`, of this or of a window of another size."""
        kept = list(values)[-len(self._losses) :]
        known = [torch.nan] * (len(self._losses) - len(kept)) + kept
        self._losses = torch.tensor(known, dtype=torch.float32, device=self._losses.device)


def is_spike(loss: Tensor, limit: Tensor) -> Tensor:
    """Return whether a loss is a spike: finite and above the limit."""
    return loss.isfinite() & (loss > limit)
