"""The learning-rate schedules of DeepSpeed's `scheduler` block, as functions of the number of the update.

The values are those of DeepSpeed 0.19.8, to the last bit. Its schedulers count from -1: they set a first rate
when they are built, and step number `update - 1` sets the rate of update number `update`. So the warmups
begin with two updates at the same rate.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from neox_config.facts.learning_rate import Count, Curve, Rate, raised_cosine

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "ScheduleType",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "WarmupType",
]

# The classes below.
ScheduleType = Literal["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

WarmupType = Literal["log", "linear"]
_Momentum = Annotated[float, Field(ge=0, lt=1)]
_CountOrNone = Annotated[int, Field(ge=0, lt=2**63)]
# The logarithm of 1 is 0: a logarithmic warmup has at least two steps.
_SHORTEST_WARMUP = 2


def _warmed_up(step: int, steps: int, kind: WarmupType) -> float:
    """Return the completed share of the warmup, from 0 to 1."""
    if kind == "linear":
        return step / steps
    return 1.0 / math.log(steps) * math.log(step + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLR(Curve):
    """A warmup, then a constant learning rate.

    Args:
        warmup_min_lr: learning rate of the first update.
        warmup_max_lr: learning rate after the warmup.
        warmup_num_steps: updates of the warmup; 1 counts as 2.
        warmup_type: shape of the warmup.
    """

    warmup_min_lr: Rate
    warmup_max_lr: Rate
    warmup_num_steps: Count
    warmup_type: WarmupType

    @property
    def reference(self) -> float:
        """Return the rate after the warmup."""
        return self.warmup_max_lr

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        step = max(0, update - 1)
        steps = max(_SHORTEST_WARMUP, self.warmup_num_steps)
        share = self._after(step, steps) if step >= steps else _warmed_up(step, steps, self.warmup_type)
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * share

    def turns(self) -> tuple[int, ...]:
        """Return the end of the warmup."""
        return (max(_SHORTEST_WARMUP, self.warmup_num_steps) + 1,)

    def _after(self, step: int, steps: int) -> float:
        """Return the share of the way from the smallest to the largest rate, after the warmup."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """A warmup, then a linear decay to `warmup_min_lr`.

    Args:
        total_num_steps: step at which the decay ends.
    """

    total_num_steps: Count

    def turns(self) -> tuple[int, ...]:
        """Return the ends of warmup and decay."""
        return (*WarmupLR.turns(self), self.total_num_steps + 1)

    def _after(self, step: int, steps: int) -> float:
        return max(0.0, (self.total_num_steps - step) / max(1, self.total_num_steps - steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosineLR(Curve):
    """A warmup to the optimizer's learning rate, then half a cosine; the first update has the rate 0.

    Args:
        lr: learning rate after the warmup.
        total_num_steps: step at which the decay ends.
        warmup_min_ratio: the warmup starts at this multiple of `lr`.
        warmup_num_steps: updates of the warmup; 1 counts as 2.
        cos_min_ratio: the decay ends at this multiple of `lr`.
        warmup_type: shape of the warmup.
    """

    lr: Rate
    total_num_steps: Count
    warmup_min_ratio: Rate
    warmup_num_steps: Count
    cos_min_ratio: Rate
    warmup_type: WarmupType

    @property
    def reference(self) -> float:
        """Return the rate after the warmup."""
        return self.lr

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        step, steps = update - 1, max(_SHORTEST_WARMUP, self.warmup_num_steps)
        if step < 0:
            return 0.0
        if step < steps:
            share = _warmed_up(step, steps, self.warmup_type)
            return self.lr * (self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio))
        progress = min(1.0, (step - steps + 1) / max(1, self.total_num_steps - steps))
        share = raised_cosine(progress) / 2
        return self.lr * max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * share)

    def turns(self) -> tuple[int, ...]:
        """Return the ends of warmup and decay."""
        return (max(_SHORTEST_WARMUP, self.warmup_num_steps) + 1, self.total_num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LRRangeTest(Curve):
    """A growing learning rate, to find the largest one with which a run does not diverge.

    Args:
        lr_range_test_min_lr: learning rate of the first update.
        lr_range_test_step_size: updates in which it grows by `lr_range_test_step_rate` times the first one.
        lr_range_test_step_rate: growth per step.
        lr_range_test_staircase: it grows once per step, not with every update.

    Source: arXiv:1803.09820.
    """

    lr_range_test_min_lr: Rate
    lr_range_test_step_size: Count
    lr_range_test_step_rate: Rate
    lr_range_test_staircase: bool

    @property
    def reference(self) -> float:
        """Return the rate of the first update."""
        return self.lr_range_test_min_lr

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        steps = update / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            steps = math.floor(steps)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycle(Curve):
    """One rise and fall of the learning rate, and the opposite of the momentum, then a slow decay of both.

    The momentum of the first update is `cycle_min_mom`, as in DeepSpeed, although its learning rate is the
    smallest. DeepSpeed also sets the second beta of Adam to 0.99; here it keeps its configured value.

    Args:
        cycle_min_lr: learning rate at the ends of the cycle.
        cycle_max_lr: learning rate between its two halves.
        decay_lr_rate: decay of the learning rate after the cycle; 0: it stays at `cycle_min_lr`.
        cycle_first_step_size: updates of the first half.
        cycle_second_step_size: updates of the second half.
        cycle_first_stair_count: stairs in the first half; 0: continuous.
        cycle_second_stair_count: stairs in the second half; 0: continuous.
        decay_step_size: updates in which the decay rates apply once; 0: no decay after the cycle.
        cycle_momentum: change the momentum as well.
        cycle_min_mom: momentum between the two halves.
        cycle_max_mom: momentum at the ends of the cycle.
        decay_mom_rate: growth of the momentum after the cycle.

    Source: arXiv:1803.09820.
    """

    cycle_min_lr: Rate
    cycle_max_lr: Rate
    decay_lr_rate: Rate
    cycle_first_step_size: Count
    cycle_second_step_size: _CountOrNone
    cycle_first_stair_count: _CountOrNone
    cycle_second_stair_count: _CountOrNone
    decay_step_size: _CountOrNone
    cycle_momentum: bool
    cycle_min_mom: _Momentum
    cycle_max_mom: _Momentum
    decay_mom_rate: Rate

    @property
    def reference(self) -> float:
        """Return the rate between the two halves of the cycle."""
        return self.cycle_max_lr

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        low, high = self.cycle_min_lr, self.cycle_max_lr
        if self._is_in_cycle(update):
            return low + (high - low) * self._height(update)
        return low / self._decay(update, self.decay_lr_rate)

    @property
    def changes_momentum(self) -> bool:
        """Return True if the curve sets the optimizer's momentum."""
        return self.cycle_momentum

    def momentum(self, update: int) -> float | None:
        """Return the momentum of an update; None if it is not changed."""
        low, high = self.cycle_min_mom, self.cycle_max_mom
        if not self.cycle_momentum:
            return None
        if update == 0:
            return low
        if self._is_in_cycle(update):
            return high - (high - low) * self._height(update)
        return high * self._decay(update, self.decay_mom_rate)

    def turns(self) -> tuple[int, ...]:
        """Return the middle and the end of the cycle."""
        return (self.cycle_first_step_size, self._size)

    @property
    def _size(self) -> int:
        return self.cycle_first_step_size + self.cycle_second_step_size

    def _is_in_cycle(self, update: int) -> bool:
        return update - 1 < self._size

    def _decay(self, update: int, rate: float) -> float:
        """Return the factor of the updates after the cycle, 1 or more."""
        if self.decay_step_size == 0 or rate == 0:
            return 1.0
        return 1 + rate * ((update - self._size) / self.decay_step_size)

    def _height(self, update: int) -> float:
        """Return the place of an update between the smallest rate, 0, and the largest, 1."""
        turns = 1.0 + update / self._size
        place, middle = turns - math.floor(turns), self.cycle_first_step_size / self._size
        rises = place <= middle
        stairs = self.cycle_first_stair_count if rises else self.cycle_second_stair_count
        if stairs > 0:
            return self._stair(update % self._size, stairs)
        return place / middle if rises else (place - 1) / (middle - 1)

    def _stair(self, place: int, stairs: int) -> float:
        """Return the height of the stair at a place in the cycle."""
        if place <= self.cycle_first_step_size:
            climbed = place * stairs / self.cycle_first_step_size
        else:
            climbed = (self._size - place) * stairs / self.cycle_second_step_size
        return math.floor(climbed) / stairs
