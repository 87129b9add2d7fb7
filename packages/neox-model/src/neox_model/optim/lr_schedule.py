"""The learning rate of every update: a warm-up, then one of the decay styles.

The rate is a pure function of the number of updates applied so far, so that it is restored from a
checkpoint by that one number. Updates that a 16-bit overflow skips are not counted: they use their data,
not their place here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
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
    """Sets the optimizer's learning rate after each applied update.

    The count of applied updates is a number of the host, advanced by `step`, until `move_to` makes it a
    device tensor, advanced by `advance`. It has the methods that DeepSpeed expects of a scheduler (`step`,
    `get_lr`, `state_dict`, `load_state_dict`).

    Args:
        optimizer: its groups get the rate; the first update's is set at once.
        curve: the rate by the number of updates applied before; a new one counts from the next `step` or
            `load_state_dict` on.
    """

    def __init__(self, optimizer: Optimizer, curve: WarmupThenDecay) -> None:
        self.optimizer = optimizer
        self.curve = curve
        self._applied: int | _DeviceCount = 0
        self._set()

    @property
    def applied_updates(self) -> int:
        """Updates applied so far; waits for the device where the count lies there."""
        return int(self._applied)

    @property
    def current_rate(self) -> float | Tensor:
        """The learning rate that the next update will use; a scalar on the device after `move_to`."""
        if isinstance(self._applied, _DeviceCount):
            return self._applied.rate(self.curve)
        return self.curve.rate(self._applied)

    def move_to(self, device: torch.device) -> None:
        """Keep the count and the rate as tensors on a device, for optimizers that take them so."""
        self._applied = _DeviceCount(self.applied_updates, device)
        self._set()

    def step(self) -> None:
        """Count one applied update and set the rate of the next."""
        assert not isinstance(self._applied, _DeviceCount), "the count lies on the device: use advance"
        self._applied += 1
        self._set()

    def advance(self, found_inf: Tensor) -> None:
        """Count one update, unless it was skipped, without waiting for the device.

        Args:
            found_inf: 1 where the update was skipped, else 0; a scalar on the device of `move_to`.
        """
        assert isinstance(self._applied, _DeviceCount), "move_to comes first"
        self._applied.advance(found_inf)
        self._set()

    def get_lr(self) -> list[float]:
        """The rate of each parameter group, under the name that DeepSpeed calls."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """All that a checkpoint must hold."""
        return {"applied_updates": self.applied_updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after `state["applied_updates"]` updates."""
        applied = int(state["applied_updates"])
        on_device = isinstance(self._applied, _DeviceCount)
        self._applied = _DeviceCount(applied, self._applied.device) if on_device else applied  # type: ignore[union-attr]
        self._set()

    def _set(self) -> None:
        rate = self.current_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate


class _DeviceCount:
    """The number of applied updates on a device, and the rates of the updates that may come next.

    The host does not know the number, only that it is at most the number of updates tried. Rates are made
    ahead for that many, a block at a time.

    Args:
        applied: updates applied before.
        device: where the count lies.
    """

    _BLOCK = 1024

    def __init__(self, applied: int, device: torch.device) -> None:
        self.device = device
        self._start = applied
        self._tried = 0
        self._counted = torch.tensor(0, device=device)
        # CUDA kernels take the rate as float32.
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        self._rates = torch.empty(0, dtype=dtype, device=device)

    def __int__(self) -> int:
        return self._start + int(self._counted)

    def advance(self, found_inf: Tensor) -> None:
        self._counted = self._counted + (found_inf == 0)
        self._tried += 1

    def rate(self, curve: WarmupThenDecay) -> Tensor:
        if self._tried >= len(self._rates):
            first = self._start + len(self._rates)
            block = [curve.rate(update) for update in range(first, first + self._BLOCK)]
            self._rates = torch.cat([self._rates, self._rates.new_tensor(block)])
        return self._rates.index_select(0, self._counted.view(1)).view(())
