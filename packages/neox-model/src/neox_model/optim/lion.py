"""Lion: the sign of an interpolated momentum, with decoupled weight decay."""

from typing import Any

import torch

from neox_model.optim.base import WeightOptimizer

__all__ = ["Lion"]


class Lion(WeightOptimizer):
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

    def _apply(self) -> None:
        for parameter, gradient, group in self._trained():
            state, (beta1, beta2) = self.state[parameter], group["betas"]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(parameter)
            mean = state["exp_avg"]
            direction = mean.lerp(gradient, 1 - beta1).sign_()
            mean.lerp_(gradient, 1 - beta2)
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(direction, alpha=group["lr"])
