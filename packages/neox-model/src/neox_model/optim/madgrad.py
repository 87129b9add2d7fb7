"""MADGRAD: dual averaging with an adaptive scale, momentum and decoupled weight decay."""

import math
from typing import Any

import torch

from neox_model.optim.base import WeightOptimizer

__all__ = ["MadgradWD"]


class MadgradWD(WeightOptimizer):
    """Moves x by (1 - momentum) towards x_0 - s / (cube root of v + eps).

    s and v are sums of gradients and squared gradients, weighted by lr * sqrt(k + 1) in update k (from 0).

    Args:
        parameters: parameter groups, each with `weight_decay`: after the update, lr * weight_decay times its
            previous value is subtracted from a weight.
        lr: learning rate.
        momentum: momentum; 0 is plain dual averaging.
        eps: added to the denominator.

    Source: arXiv:2101.11075, algorithm 1.
    """

    def __init__(
        self, parameters: list[dict[str, Any]], *, lr: float, momentum: float = 0.9, eps: float = 1e-6
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "eps": eps, "weight_decay": 0.0})

    def _apply(self) -> None:
        for parameter, gradient, group in self._trained():
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["start"] = parameter.clone()
                state["grad_sum"] = torch.zeros_like(parameter)
                state["grad_sum_sq"] = torch.zeros_like(parameter)
            weight = group["lr"] * math.sqrt(float(state["step"]) + 1)
            state["step"] += 1
            state["grad_sum"].add_(gradient, alpha=weight)
            state["grad_sum_sq"].addcmul_(gradient, gradient, value=weight)
            scale = state["grad_sum_sq"].pow(1 / 3).add_(group["eps"])
            target = state["start"].addcdiv(state["grad_sum"], scale, value=-1)
            before = parameter.clone() if group["weight_decay"] else None
            parameter.lerp_(target, 1 - group["momentum"])
            if before is not None:
                parameter.sub_(before, alpha=group["lr"] * group["weight_decay"])
