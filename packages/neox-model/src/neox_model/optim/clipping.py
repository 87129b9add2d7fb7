"""Clipping by the global gradient norm for engines that leave it to the plain optimizer.

With 32-bit weights and ZeRO stage 0 DeepSpeed computes the norm only to clip and then forgets it. This does
both, just before the optimizer's update, so that every combination of precision, ZeRO stage and pipeline
reports the norm.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Parameter
from torch.optim import Optimizer

from neox_model.parallel.groups import Group, Groups

__all__ = ["GradientClipper", "global_gradient_norm"]


def global_gradient_norm(parameters: Sequence[Parameter], groups: Groups) -> Tensor:
    """The 2-norm over the gradients of the whole model, every logical element counted once.

    Collective over the model and pipe groups. Parameters that tensor ranks hold alike count on model rank
    0, those that stages share (`ds_pipe_replicated`, set by DeepSpeed) on their owner.

    Returns:
        A float32 scalar on the gradients' device.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        if _counts_here(parameter, groups.model):
            total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square()
    for group in (groups.model, groups.pipe):
        if group.size > 1:
            distributed.all_reduce(total, group=group.process_group)
    return total.sqrt()


class GradientClipper:
    """Clips an optimizer's gradients before each of its updates and keeps the norm they had.

    Args:
        optimizer: hooked; its parameters are those whose gradients count.
        max_norm: gradients are scaled down to this norm; 0 leaves them alone.
        groups: over which the norm is summed.
    """

    def __init__(self, optimizer: Optimizer, *, max_norm: float, groups: Groups) -> None:
        self.norm: Tensor | None = None
        self._max_norm = max_norm
        self._groups = groups
        optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.norm = global_gradient_norm(parameters, self._groups)
        if self._max_norm > 0:
            scale = (self._max_norm / (self.norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)


def _counts_here(parameter: Parameter, model: Group) -> bool:
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return model.rank == 0 or getattr(parameter, "model_parallel", False)
