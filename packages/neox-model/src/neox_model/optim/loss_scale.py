"""The loss scale of float16 training, kept on the device.

Small float16 gradients underflow to zero. The loss is therefore multiplied by a scale before the backward
pass, and gradients are divided by it before the update. A dynamic scale is halved when gradients overflow and
doubled after a run of updates without overflow.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from neox_config.spec.update import LossScaling

__all__ = ["LossScale"]

_FACTOR = 2.0


class LossScale:
    """A loss scale whose state is on the device, so that updates do not synchronize.

    The rules, and the names of the saved state, are those of DeepSpeed's dynamic loss scaler, so that a run
    may change between ZeRO stages.

    Args:
        settings: the settings.
        device: device of the state.

    Attributes:
        value: the scale of the next backward pass, a float32 scalar.
    """

    def __init__(self, settings: LossScaling, device: torch.device) -> None:
        self.settings = settings
        self._maximum = math.inf if settings.maximum is None else settings.maximum
        self.value = torch.tensor(float(settings.initial), dtype=torch.float32, device=device)
        self._updates = torch.tensor(0, device=device)
        self._last_overflow = torch.tensor(-1, device=device)
        self._hysteresis = torch.tensor(settings.hysteresis, device=device)

    @property
    def floor(self) -> float:
        """Return the lower bound of the scale; the constant value if it is static."""
        return self.settings.minimum if self.settings.is_dynamic else self.settings.initial

    def update(self, found_inf: Tensor) -> None:
        """Count one update.

        Args:
            found_inf: 1 if its gradients overflowed, else 0; a scalar on the device.
        """
        if not self.settings.is_dynamic:
            return
        overflows = found_inf > 0
        full = torch.full_like(self._hysteresis, self.settings.hysteresis)
        halves = overflows & (self._hysteresis <= 1)
        stable = self._updates - self._last_overflow - 1
        doubles = ~overflows & (stable > 0) & (stable % self.settings.window == 0)
        restores = ~overflows if self.settings.consecutive_hysteresis else doubles

        lowered = (self.value / _FACTOR).clamp(min=self.settings.minimum)
        raised = (self.value * _FACTOR).clamp(max=self._maximum)
        scale = torch.where(halves, lowered, self.value)
        self.value = torch.where(doubles, raised, scale)
        spent = torch.where(overflows & ~halves, self._hysteresis - 1, self._hysteresis)
        self._hysteresis = torch.where(restores, full, spent)
        self._last_overflow = torch.where(overflows, self._updates, self._last_overflow)
        self._updates = self._updates + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint; waits for the device."""
        return {
            "cur_scale": float(self.value),
            "cur_iter": int(self._updates),
            "last_overflow_iter": int(self._last_overflow),
            "cur_hysteresis": int(self._hysteresis),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; a static scale, and missing entries, stay as configured.

        No more overflows are waited for than the configured hysteresis, which may have become smaller.
        """
        if not self.settings.is_dynamic:
            return
        for name, tensor in (
            ("cur_scale", self.value),
            ("cur_iter", self._updates),
            ("last_overflow_iter", self._last_overflow),
            ("cur_hysteresis", self._hysteresis),
        ):
            if state.get(name) is not None:
                tensor.fill_(state[name])
        self._hysteresis.clamp_(max=self.settings.hysteresis)
