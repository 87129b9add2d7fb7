"""Sets the learning rate of each update in an optimizer.

The learning rate is a pure function of the number of applied updates (`neox_config.facts.learning_rate`), so
a checkpoint stores only this number. Updates skipped because of a 16-bit overflow do not count.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from neox_config.facts.learning_rate import WarmupThenDecay

__all__ = ["LearningRateSchedule"]


class LearningRateSchedule:
    """Sets the optimizer's learning rate after each applied update.

    The count of applied updates is on the host, advanced by `step`, until `move_to` makes it a device tensor,
    advanced by `advance`. The class has the methods that DeepSpeed requires of a scheduler (`step`, `get_lr`,
    `state_dict`, `load_state_dict`).

    Args:
        optimizer: the learning rate is set in its groups, for the first update immediately.
        curve: learning rate by the number of applied updates. A curve assigned later takes effect after the
            next `load_state_dict`, because rates on a device are computed in advance.
    """

    def __init__(self, optimizer: Optimizer, curve: WarmupThenDecay) -> None:
        self.optimizer = optimizer
        self.curve = curve
        self._applied: int | _DeviceCount = 0
        self._set()

    @property
    def applied_updates(self) -> int:
        """Return the number of applied updates; waits for the device if the count is there."""
        return int(self._applied)

    @property
    def current_rate(self) -> float | Tensor:
        """Return the learning rate of the next update; a scalar on the device after `move_to`."""
        if isinstance(self._applied, _DeviceCount):
            return self._applied.rate(self.curve)
        return self.curve.rate(self._applied)

    def move_to(self, device: torch.device) -> None:
        """Move the count and the learning rate to a device, for optimizers that accept tensors."""
        self._applied = _DeviceCount(self.applied_updates, device)
        self._set()

    def step(self) -> None:
        """Count one applied update and set the learning rate of the next."""
        assert not isinstance(self._applied, _DeviceCount), "the count is on the device: use advance"
        self._applied += 1
        self._set()

    def advance(self, found_inf: Tensor) -> None:
        """Count one update, unless it was skipped, without waiting for the device.

        Args:
            found_inf: 1 if the update was skipped, else 0; a scalar on the device of `move_to`.
        """
        assert isinstance(self._applied, _DeviceCount), "move_to comes first"
        self._applied.advance(found_inf)
        self._set()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group, as DeepSpeed requires."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Return the state to save in a checkpoint."""
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
    """The number of applied updates on a device, and the learning rates of possible next updates.

    The host knows only that the number is at most the number of attempted updates, and computes learning
    rates for these in advance, a block at a time.

    Args:
        applied: number of updates applied before.
        device: device of the count.
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
