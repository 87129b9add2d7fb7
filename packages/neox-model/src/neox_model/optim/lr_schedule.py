"""The learning rate of every update: a warm-up, then one of the decay styles.

The rate is a pure function of the number of updates applied so far, so that it is restored from a
checkpoint by that one number. Updates that a 16-bit overflow skips are not counted: they use their data,
not their place here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

__all__ = ["DECAY_STYLES", "LearningRateSchedule", "WarmupThenDecay"]


def _constant(progress: float, *, peak: float, floor: float) -> float:
    return peak


def _linear(progress: float, *, peak: float, floor: float) -> float:
    return peak * (1.0 - progress)


def _cosine(progress: float, *, peak: float, floor: float) -> float:
    return floor + (peak - floor) / 2 * (math.cos(math.pi * progress) + 1)


def _exponential(progress: float, *, peak: float, floor: float) -> float:
    return peak * math.exp(-0.693 * progress)


DECAY_STYLES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
}
"""The rate at a progress from 0 (end of the warm-up) to 1 (end of the decay), before the floor is applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupThenDecay:
    """The rate as a function of the update's number.

    During the warm-up the floor does not apply; the first update already has a rate above 0. After
    `decay_iterations` the rate stays what it was at their end.

    Args:
        style: a key of `DECAY_STYLES`.
        peak: the rate at the end of the warm-up.
        floor: the rate never falls below it after the warm-up.
        warmup: the part of `decay_iterations` that the warm-up takes; the product is not rounded.
        decay_iterations: updates from the start to the end of the decay, the warm-up included.

    Source: the formulas of GPT-NeoX's annealing schedule, with the decay counted from the end of the warm-up.
    """

    style: str
    peak: float
    floor: float
    warmup: float
    decay_iterations: int

    def rate(self, update: int) -> float:
        """The learning rate of update number `update`, counted from 0."""
        warmup = self.warmup * self.decay_iterations
        place = min(update, self.decay_iterations)
        if warmup > 0 and place <= warmup:
            return self.peak * min(1.0, max(1, place) / warmup)
        progress = (place - warmup) / (self.decay_iterations - warmup)
        return max(self.floor, DECAY_STYLES[self.style](progress, peak=self.peak, floor=self.floor))


class LearningRateSchedule:
    """Sets the optimizer's learning rate after each applied update; the engine calls `step`.

    It has the methods that DeepSpeed expects of a scheduler (`step`, `get_lr`, `state_dict`,
    `load_state_dict`).

    Args:
        optimizer: its groups get the rate; the first update's is set at once.
        curve: the rate by the number of updates applied before; a new one counts from the next `step` or
            `load_state_dict` on.
    """

    def __init__(self, optimizer: Optimizer, curve: WarmupThenDecay) -> None:
        self.optimizer = optimizer
        self.curve = curve
        self.applied_updates = 0
        self._set()

    def step(self) -> None:
        """Count one applied update and set the rate of the next."""
        self.applied_updates += 1
        self._set()

    @property
    def current_rate(self) -> float:
        """The learning rate that the next update will use."""
        return self.curve.rate(self.applied_updates)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group, under the name that DeepSpeed calls."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """All that a checkpoint must hold."""
        return {"applied_updates": self.applied_updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after `state["applied_updates"]` updates."""
        self.applied_updates = int(state["applied_updates"])
        self._set()

    def _set(self) -> None:
        rate = self.current_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
