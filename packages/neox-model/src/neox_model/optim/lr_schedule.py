"""Sets the learning rate, and the momentum if the curve changes it, of each update in an optimizer.

Both are pure functions of the number of applied updates (`neox_config.facts.learning_rate`), so a checkpoint
stores only this number. Updates skipped because of a 16-bit overflow do not count.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neox_config.facts.learning_rate import Curve

__all__ = ["LearningRateSchedule"]


class LearningRateSchedule:
    """Sets the optimizer's learning rate and momentum after each applied update.

    The count of applied updates is on the host, advanced by `step`, until `move_to` makes it a device tensor,
    advanced by `advance`. With a curve that changes the momentum it stays on the host, because optimizers
    take a momentum only from there. The class has the methods that DeepSpeed requires of a scheduler (`step`,
    `get_lr`, `state_dict`, `load_state_dict`).

    Args:
        optimizer: the learning rate is set in its groups, for the first update immediately.
        curve: learning rate by the number of applied updates. A curve assigned later takes effect after the
            next `load_state_dict`, because rates on a device are computed in advance.

    Raises:
        ValueError: the curve changes the momentum, and the optimizer has none.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve) -> None:
        self.optimizer = optimizer
        self.curve = curve
        # Another curve may leave the momentum at its configured value.
        self._configured_momenta = [_momentum_of(group) for group in optimizer.param_groups]
        self._device: torch.device | None = None
        self._applied: int | _DeviceCount = 0
        if not self.accepts(curve):
            raise ValueError(
                f"{type(curve).__name__} changes the momentum, and {type(optimizer).__name__} has none"
            )
        self._set()

    def accepts(self, curve: Curve) -> bool:
        """Return True unless the curve changes a momentum that the optimizer does not have."""
        return None not in self._configured_momenta or not curve.changes_momentum

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

    @property
    def current_momentum(self) -> float | None:
        """Return the momentum of the next update; None if the curve does not change it."""
        return self.curve.momentum(self.applied_updates) if self.curve.changes_momentum else None

    @property
    def is_on_device(self) -> bool:
        """Return True if the count is on a device: `advance` counts updates, not `step`."""
        return isinstance(self._applied, _DeviceCount)

    def move_to(self, device: torch.device) -> None:
        """Keep count and learning rate on a device where possible, for optimizers that accept tensors."""
        self._device = device
        self._continue_from(self.applied_updates)

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
        self._continue_from(int(state["applied_updates"]))

    def _continue_from(self, applied: int) -> None:
        stays_on_host = self._device is None or self.curve.changes_momentum
        self._applied = applied if stays_on_host else _DeviceCount(applied, self._device)  # type: ignore[arg-type]
        self._set()

    def _set(self) -> None:
        rate, momentum = self.current_rate, self.current_momentum
        for group, configured in zip(self.optimizer.param_groups, self._configured_momenta, strict=True):
            group["lr"] = rate * group["rate_multiplier"] if "rate_multiplier" in group else rate
            if "reference_lr" in group:  # Muon's, for its second learning rate.
                group["reference_lr"] = self.curve.reference
            _set_momentum(group, configured if momentum is None else momentum)


def _momentum_name(group: dict[str, Any]) -> str | None:
    """Return the key of a group's momentum: of Muon's matrices `momentum`, else `betas` if it has them."""
    if group.get("is_of_matrices"):
        return "momentum"
    return next((name for name in ("betas", "momentum") if name in group), None)


def _momentum_of(group: dict[str, Any]) -> float | None:
    """Return the momentum of a parameter group, which is the first beta of Adam; None if it has none."""
    name = _momentum_name(group)
    if name is None:
        return None
    momentum: float = group["betas"][0] if name == "betas" else group[name]
    return momentum


def _set_momentum(group: dict[str, Any], momentum: float | None) -> None:
    name = _momentum_name(group)
    if name is not None:
        group[name] = (momentum, *group["betas"][1:]) if name == "betas" else momentum


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

    def rate(self, curve: Curve) -> Tensor:
        if self._tried >= len(self._rates):
            first = self._start + len(self._rates)
            block = [curve.rate(update) for update in range(first, first + self._BLOCK)]
            self._rates = torch.cat([self._rates, self._rates.new_tensor(block)])
        return self._rates.index_select(0, self._counted.view(1)).view(())
