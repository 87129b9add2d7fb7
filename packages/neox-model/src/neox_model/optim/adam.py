"""Adam with decoupled (AdamW) or plain weight decay, as torch's fused implementation.

DeepSpeed's Adam kernels are compiled at the first start of a run; torch's require no compiler. Adam
without bias correction, which torch lacks, is implemented here with plain operations.
"""

from typing import Any, Literal

import torch
from torch.optim import Optimizer

from neox_model.optim.base import WeightOptimizer
from neox_model.optim.rounded_adam import RoundedAdam
from neox_model.optim.uncompiled import without_compiler

__all__ = ["UncorrectedAdam", "adam"]


def adam(
    parameters: list[dict[str, Any]],
    *,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    state_dtype: Literal["fp32", "bf16"] = "fp32",
    **settings: Any,
) -> Optimizer:
    """Build Adam over parameter groups.

    Args:
        parameters: parameter groups.
        adam_w_mode: decoupled weight decay.
        bias_correction: correct the running means for their initialization with zero.
        state_dtype: dtype in which the running means are stored.
        settings: `lr`, `betas` and `eps`.

    Source: arXiv:1412.6980; arXiv:1711.05101 (decoupled decay).
    """
    if state_dtype == "bf16":
        return RoundedAdam(parameters, is_decoupled=adam_w_mode, is_corrected=bias_correction, **settings)
    if not bias_correction:
        return UncorrectedAdam(parameters, is_decoupled=adam_w_mode, **settings)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return without_compiler(kind, parameters, fused=True, **settings)


class UncorrectedAdam(WeightOptimizer):
    """Adam without bias correction: the running means, and thus the first updates, are small at the start.

    Args:
        parameters: parameter groups, each with `weight_decay`.
        lr: learning rate.
        betas: decay of the running means of gradients and squared gradients.
        eps: added to the denominator.
        is_decoupled: decoupled weight decay.
    """

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        is_decoupled: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(parameters, defaults)
        self._is_decoupled = is_decoupled

    def _apply(self) -> None:
        for parameter, gradient, group in self._trained():
            state = self.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(parameter)
            decay, (beta1, beta2) = group["weight_decay"], group["betas"]
            if decay and self._is_decoupled:
                parameter.mul_(1 - group["lr"] * decay)
            elif decay:
                gradient = gradient + decay * parameter
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])
