"""The 2-norm over the gradients of the whole model."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.nn import Parameter

from neox_model.parallel.groups import Group, Groups

__all__ = ["global_gradient_norm"]


def global_gradient_norm(
    parameters: Sequence[Parameter], gradients: Sequence[Tensor], groups: Groups
) -> Tensor:
    """Compute the 2-norm over the gradients of all ranks, every logical element counted once.

    Parameters that tensor-parallel ranks hold as copies count on model rank 0; those that pipeline stages
    hold as copies (`ds_pipe_replicated`, set by DeepSpeed) count on their owner. Collective over the model
    and pipe groups.

    Args:
        parameters: this rank's parameters, which say what they are copies of.
        gradients: their gradients, one each.
        groups: this rank's groups.

    Returns:
        A float32 scalar on the gradients' device; not finite where any gradient is not.
    """
    counted = [
        gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
        if _counts_here(parameter, groups.model)
    ]
    total = torch.zeros((), device=parameters[0].device)
    if counted:
        norms = torch._foreach_norm(counted, 2, dtype=torch.float32)
        total = torch.stack(norms).square().sum()
    for group in (groups.model, groups.pipe):
        if group.size > 1:
            distributed.all_reduce(total, group=group.process_group)
    return total.sqrt()


def _counts_here(parameter: Parameter, model: Group) -> bool:
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return model.rank == 0 or getattr(parameter, "model_parallel", False)
