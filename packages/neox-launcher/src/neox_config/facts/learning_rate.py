"""The learning rate by the number of applied updates: a warmup, then one of the decay styles.

`neox-config schedule` and the training both compute it with `WarmupThenDecay`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

__all__ = ["DECAY_STYLES", "Decay", "DecayStyle", "WarmupThenDecay"]

# A stored number of a learning rate.
_Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DecayStyle = Literal["constant", "linear", "cosine", "exponential"]


def _constant(progress: float, *, peak: float, floor: float) -> float:
    return peak


def _linear(progress: float, *, peak: float, floor: float) -> float:
    return peak * (1.0 - progress)


def _cosine(progress: float, *, peak: float, floor: float) -> float:
    return floor + (peak - floor) / 2 * (math.cos(math.pi * progress) + 1)


def _exponential(progress: float, *, peak: float, floor: float) -> float:
    return peak * math.exp(-0.693 * progress)


@dataclass(frozen=True, slots=True)
class Decay:
    """One decay style.

    Args:
        rate: learning rate by progress, from 0 (end of warmup) to 1 (end of decay), before the floor applies.
        formula: the same for the documentation; t counts the updates since warmup, T those until the end.
    """

    rate: Callable[..., float]
    formula: str


DECAY_STYLES: Mapping[str, Decay] = {
    "constant": Decay(_constant, "lr"),
    "linear": Decay(_linear, "lr * (T - t) / T"),
    "cosine": Decay(_cosine, "min-lr + (lr - min-lr) / 2 * (cos(pi * t / T) + 1)"),
    "exponential": Decay(_exponential, "lr * exp(-0.693 * t / T)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupThenDecay:
    """The learning rate as a function of the number of the update. Its types are those of a stored one.

    The floor does not apply during the warmup; the first update has a rate above 0. After `decay_iterations`
    the rate is constant.

    Args:
        style: a key of `DECAY_STYLES`.
        peak: learning rate at the end of the warmup.
        floor: lower bound of the learning rate after the warmup.
        warmup: fraction of `decay_iterations` used for the warmup; the product is not rounded.
        decay_iterations: updates from the start to the end of the decay, including the warmup.

    Source: the formulas of GPT-NeoX's annealing schedule, with the decay counted from the end of the warmup.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    style: DecayStyle
    peak: _Rate
    floor: _Rate
    warmup: _Rate
    decay_iterations: Annotated[int, Field(ge=1, lt=2**63)]

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        warmup = self.warmup * self.decay_iterations
        place = min(update, self.decay_iterations)
        if warmup > 0 and place <= warmup:
            return self.peak * min(1.0, max(1, place) / warmup)
        progress = (place - warmup) / (self.decay_iterations - warmup)
        decay = DECAY_STYLES[self.style]
        return max(self.floor, decay.rate(progress, peak=self.peak, floor=self.floor))
