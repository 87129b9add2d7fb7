"""The base of optimizers that are written here."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Trained", "WeightOptimizer"]

Trained = list[tuple[Tensor, Tensor, dict[str, Any]]]
"""Weights that have gradients, each with its gradient and its parameter group."""


class WeightOptimizer(Optimizer):
    """An optimizer whose update is `_apply`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one update. Collective over the groups of ranks that the optimizer was given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply()
        return loss

    def _apply(self) -> None:
        raise NotImplementedError

    def _trained(self) -> Trained:
        return [
            (parameter, parameter.grad, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
