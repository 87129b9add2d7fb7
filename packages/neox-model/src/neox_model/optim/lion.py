"""Lion: the sign of an interpolated momentum, with decoupled weight decay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Lion"]


class Lion(Optimizer):
    """Moves each weight by the learning rate, against the sign of b1 * m + (1 - b1) * g.

    m, the mean of gradients g with the decay b2, is updated afterwards. An element whose gradients were all
    zero does not move, except by weight decay.

    Args:
        parameters: parameter groups, each with `weight_decay`: lr * weight_decay times its value is
            subtracted from a weight.
        lr: learning rate; a third to a tenth of Adam's.
        betas: b1 of the interpolation, b2 of the mean.

    Source: arXiv:2302.06675, algorithm 2.
    """

    def __init__(
        self, parameters: list[dict[str, Any]], *, lr: float, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean = state["exp_avg"]
        direction = mean.lerp(gradient, 1 - beta1).sign_()
        mean.lerp_(gradient, 1 - beta2)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(direction, alpha=group["lr"])
