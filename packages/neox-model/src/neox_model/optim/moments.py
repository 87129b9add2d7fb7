"""The running means of gradients and squared gradients, as Adam defines them."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["moment_ratio", "update_moments"]

Betas = tuple[float, float]


def update_moments(state: dict[str, Any], gradient: Tensor, betas: Betas) -> None:
    """Count an update in `step`, and take a gradient into `exp_avg` and `exp_avg_sq`.

    `step` begins on the host, whatever device the gradient is on: `moment_ratio` then reads it without
    waiting for the device.

    Args:
        state: the optimizer's states of a weight; empty before its first update.
        gradient: the gradient.
        betas: decay of the means of gradients and squared gradients.
    """
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(gradient)
        state["exp_avg_sq"] = torch.zeros_like(gradient)
    state["step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - betas[0])
    state["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])


def moment_ratio(state: dict[str, Any], betas: Betas, *, eps: float, bias_correction: bool = True) -> Tensor:
    """Return the mean gradient divided by (the root of the mean squared gradient + eps).

    Args:
        state: the optimizer's states of a weight.
        betas: as in `update_moments`.
        eps: added to the denominator.
        bias_correction: divide each mean by 1 - beta^step first, because it started at zero.

    Source: arXiv:1412.6980, algorithm 1.
    """
    step = float(state["step"])
    of_mean, of_square = (1 - beta**step if bias_correction else 1.0 for beta in betas)
    root = (state["exp_avg_sq"] / of_square).sqrt_()
    return (state["exp_avg"] / of_mean).div_(root.add_(eps))
