"""The learning rate by the number of applied updates: a warmup, then one of the decay styles.

`neox-config schedule` and the run both compute it with a `Curve`; `facts.curves` lists all of them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

__all__ = [
    "DECAY_STYLES",
    "FINAL_DECAYS",
    "Count",
    "Curve",
    "Decay",
    "DecayStyle",
    "LrDecayStyle",
    "Rate",
    "RepeatedDecay",
    "StableDecayStyle",
    "WarmupStableDecay",
    "WarmupThenDecay",
    "raised_cosine",
]

# Stored numbers of a curve: a learning rate, a ratio or a momentum; a number of updates.
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
DecayStyle = Literal["constant", "linear", "cosine", "exponential"]
# The values of lr-decay-style: those above, and the curve that is constant until its last part.
LrDecayStyle = Literal[DecayStyle, "wsd"]
StableDecayStyle = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True, slots=True)
class Curve:
    """The learning rate, and possibly the momentum, as functions of the number of the update, from 0.

    A curve is a frozen dataclass of plain values, without other state; a checkpoint stores its class and its
    values.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    def rate(self, update: int) -> float:
        """Return the learning rate of an update."""
        raise NotImplementedError

    @property
    def reference(self) -> float:
        """Return the rate to which a second one is relative: the largest, of LRRangeTest the first."""
        raise NotImplementedError

    @property
    def changes_momentum(self) -> bool:
        """Return True if the curve sets the optimizer's momentum."""
        return False

    def momentum(self, update: int) -> float | None:
        """Return the momentum of an update; None: that of the optimizer's settings."""
        return None

    def turns(self) -> tuple[int, ...]:
        """Return the updates at which the formula changes."""
        return ()


def raised_cosine(progress: float) -> float:
    """Return a half cosine from 2, at progress 0, to 0, at progress 1."""
    return math.cos(math.pi * progress) + 1


def _warming_up(place: int, warmup: float, peak: float) -> float:
    """Return the learning rate during a warmup; the first update has a rate above 0."""
    return peak * min(1.0, max(1, place) / warmup)


def _constant(progress: float, *, peak: float, floor: float) -> float:
    return peak


def _linear(progress: float, *, peak: float, floor: float) -> float:
    return peak * (1.0 - progress)


def _cosine(progress: float, *, peak: float, floor: float) -> float:
    return floor + (peak - floor) / 2 * raised_cosine(progress)


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


def _linear_to_floor(progress: float, *, peak: float, floor: float) -> float:
    return floor + (peak - floor) * (1.0 - progress)


def _one_minus_sqrt(progress: float, *, peak: float, floor: float) -> float:
    return floor + (peak - floor) * (1.0 - math.sqrt(progress))


FINAL_DECAYS: Mapping[str, Decay] = {
    "linear": Decay(_linear_to_floor, "min-lr + (lr - min-lr) * (1 - d / L)"),
    "cosine": Decay(_cosine, "min-lr + (lr - min-lr) / 2 * (cos(pi * d / L) + 1)"),
    "1-sqrt": Decay(_one_minus_sqrt, "min-lr + (lr - min-lr) * (1 - sqrt(d / L))"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupThenDecay(Curve):
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

    style: DecayStyle
    peak: Rate
    floor: Rate
    warmup: Rate
    decay_iterations: Count

    @property
    def reference(self) -> float:
        """Return the rate at the end of the warmup."""
        return self.peak

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        warmup = self.warmup * self.decay_iterations
        place = min(update, self.decay_iterations)
        if warmup > 0 and place <= warmup:
            return _warming_up(place, warmup, self.peak)
        progress = (place - warmup) / (self.decay_iterations - warmup)
        decay = DECAY_STYLES[self.style]
        return max(self.floor, decay.rate(progress, peak=self.peak, floor=self.floor))

    def turns(self) -> tuple[int, ...]:
        """Return the ends of warmup and decay."""
        return (round(self.warmup * self.decay_iterations), self.decay_iterations)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay(Curve):
    """A warmup, a constant learning rate, and a decay to the floor in the last updates.

    Args:
        style: a key of `FINAL_DECAYS`.
        peak: learning rate from the end of the warmup to the start of the decay.
        floor: learning rate at the end of the decay, and after it.
        warmup: fraction of `iterations` used for the warmup; the product is not rounded.
        iterations: updates from the start to the end of the decay, including the warmup.
        decay_iterations: the last of these, in which the learning rate decays.

    Source: arXiv:2404.06395 (the schedule), arXiv:2405.18392 (its forms).
    """

    style: StableDecayStyle
    peak: Rate
    floor: Rate
    warmup: Rate
    iterations: Count
    decay_iterations: Count

    @property
    def reference(self) -> float:
        """Return the rate between warmup and decay."""
        return self.peak

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        warmup = self.warmup * self.iterations
        place = min(update, self.iterations)
        if warmup > 0 and place <= warmup:
            return _warming_up(place, warmup, self.peak)
        decayed = place - (self.iterations - self.decay_iterations)
        if decayed <= 0:
            return self.peak
        decay = FINAL_DECAYS[self.style]
        return decay.rate(decayed / self.decay_iterations, peak=self.peak, floor=self.floor)

    def turns(self) -> tuple[int, ...]:
        """Return the end of the warmup, and start and end of the decay."""
        stable = self.iterations - self.decay_iterations
        return (round(self.warmup * self.iterations), stable, self.iterations)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedDecay(WarmupStableDecay):
    """A constant learning rate with several decays; after each but the last, it is the peak again.

    Args:
        earlier: for each decay before the last, the updates until its end, and those of the decay itself.

    Source: arXiv:2410.05192 (WSD-S).
    """

    earlier: tuple[tuple[Count, Count], ...]

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        for end, length in self.earlier:
            if end - length < update < end:
                progress = (update - end + length) / length
                return FINAL_DECAYS[self.style].rate(progress, peak=self.peak, floor=self.floor)
        return WarmupStableDecay.rate(self, update)

    def turns(self) -> tuple[int, ...]:
        """Return the end of the warmup, and start and end of each decay."""
        warmup, *last = WarmupStableDecay.turns(self)
        return (warmup, *(turn for end, length in self.earlier for turn in (end - length, end)), *last)
