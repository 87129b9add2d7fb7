"""The 2-norms of gradients, over the whole model and of each whole tensor, and their share of zeros."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from neox_model.parallel.collectives import all_gather, all_reduce
from neox_model.parallel.groups import Group, Groups
from neox_model.parallel.logical import is_expert, is_stage_copy, split_dim_of, whole_shape_of
from neox_model.torch_compat import foreach_norm

__all__ = [
    "global_gradient_norm",
    "norm_over_replicas",
    "share_of_zeros",
    "shares_of_zeros",
    "tensor_gradient_norms",
]


def global_gradient_norm(
    parameters: Sequence[Parameter],
    gradients: Sequence[Tensor],
    groups: Groups,
    *,
    are_sharded: bool = False,
) -> Tensor:
    """Compute the 2-norm over the gradients of the whole model, every logical element counted once.

    Parameters that tensor-parallel ranks hold as copies count on model rank 0; those that pipeline stages
    hold as copies (`is_stage_copy`) count on their owner. Collective over the model and pipe groups, and over
    the ranks that divide experts.

    Args:
        parameters: this rank's parameters.
        gradients: their gradients, one each.
        groups: this rank's process groups.
        are_sharded: each data-parallel rank has a part of every gradient; collective over the data group too.

    Returns:
        A float32 scalar on the parameters' device; not finite if any gradient is not, and infinite if the
        square of the norm exceeds float32.
    """
    divides = groups.experts.size > 1

    def sum_of_squares(*, of_experts: bool) -> Tensor:
        counted = [
            gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if _counts_here(parameter, groups.model) and (divides and is_expert(parameter)) == of_experts
        ]
        if not counted:
            return torch.zeros((), device=parameters[0].device)
        return torch.stack(_norms(counted)).square().sum().to(parameters[0].device)

    total = sum_of_squares(of_experts=False)
    if divides:
        of_experts = sum_of_squares(of_experts=True)
        total = total + (of_experts if are_sharded else all_reduce(of_experts, groups.experts))
    for group in (groups.model, groups.pipe, *((groups.data,) if are_sharded else ())):
        total = all_reduce(total, group)
    return total.sqrt()


def norm_over_replicas(norms: Tensor, data: Group) -> Tensor:
    """Return the root of the mean of squared norms over data-parallel ranks. Collective.

    Args:
        norms: norms of gradients that are not averaged over replicas, of any shape.
        data: the data-parallel ranks.
    """
    if data.size == 1:
        return norms
    rows = all_gather((norms.square() / data.size).unsqueeze(0), data, dim=0)
    # Added in the order of the ranks: an all-reduce may add each number in another order.
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total.sqrt()


def share_of_zeros(
    parameters: Sequence[Parameter],
    gradients: Sequence[Tensor],
    groups: Groups,
    *,
    are_averaged: bool = True,
    are_sharded: bool = False,
) -> Tensor:
    """Compute the share of gradient elements equal to 0 over the whole model, each logical element once.

    Padding of split tensors does not count. Collective over the model and pipe groups.

    Args:
        parameters: this rank's parameters.
        gradients: their gradients, one each.
        groups: this rank's process groups.
        are_averaged: False: gradients differ between data-parallel ranks, and those of all ranks count;
            collective over the data group too.
        are_sharded: each data-parallel rank has a part of every gradient; collective over the data group too.

    Returns:
        A float64 scalar on the parameters' device, the same on all ranks.
    """
    device = parameters[0].device
    totals = torch.zeros(2, 2, dtype=torch.float64, device=device)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if _counts_here(parameter, groups.model):
            own = _without_padding(parameter, gradient)
            totals[int(is_expert(parameter)), 0] += own.count_nonzero().to(device)
            totals[int(is_expert(parameter)), 1] += own.numel()
    differ = are_sharded or not are_averaged
    of_experts = totals[1] if differ else all_reduce(totals[1], groups.experts)
    totals = totals[0] + of_experts
    for group in (groups.model, groups.pipe, *((groups.data,) if differ else ())):
        totals = all_reduce(totals, group)
    return 1.0 - totals[0] / totals[1]


def shares_of_zeros(
    names: Mapping[int, str],
    parameters: Sequence[Parameter],
    gradients: Sequence[Tensor],
    groups: Groups,
    *,
    are_averaged: bool = True,
    are_sharded: bool = False,
) -> dict[str, Tensor]:
    """Compute the share of elements equal to 0 of each whole tensor's gradient.

    Arguments and result are those of `tensor_gradient_norms`, and float64; if gradients are not averaged,
    those of all data-parallel ranks count.
    """
    owned = [pair for pair in zip(parameters, gradients, strict=True) if not is_stage_copy(pair[0])]
    if not owned:
        return {}
    found = torch.stack([_without_padding(*pair).count_nonzero() for pair in owned]).double()
    differ = are_sharded or not are_averaged
    found = _summed_over_parts(found, [parameter for parameter, _ in owned], groups, differ=differ)
    copies = 1 if are_averaged else groups.data.size
    sizes = [copies * whole_shape_of(parameter).numel() for parameter, _ in owned]
    shares = 1.0 - found / found.new_tensor(sizes)
    return {names[id(parameter)]: share for (parameter, _), share in zip(owned, shares.unbind(), strict=True)}


def tensor_gradient_norms(
    names: Mapping[int, str],
    parameters: Sequence[Parameter],
    gradients: Sequence[Tensor],
    groups: Groups,
    *,
    scale: Tensor | None,
    are_averaged: bool = True,
    are_sharded: bool = False,
) -> dict[str, Tensor]:
    """Compute the 2-norm of the gradient of each whole logical tensor. Collective over the model group.

    Args:
        names: logical name of each parameter, by its id.
        parameters: this rank's parameters. Copies of other stages' weights are left out.
        gradients: their gradients, one each; the same on all data-parallel ranks if they are averaged and not
            sharded.
        groups: this rank's process groups.
        scale: the loss scale, by which the norms are divided; None: 1.
        are_averaged: False: the norms are those of `norm_over_replicas`, collective over the data group too.
        are_sharded: each data-parallel rank has a part of every gradient; collective over the data group too.

    Returns:
        Name to a float32 scalar on the gradients' device, the same on all tensor-parallel ranks.
    """
    owned = [pair for pair in zip(parameters, gradients, strict=True) if not is_stage_copy(pair[0])]
    norms = _norms([gradient for _, gradient in owned])
    if norms:
        squares = torch.stack(norms).square()
        parameters = [parameter for parameter, _ in owned]
        norms = list(_summed_over_parts(squares, parameters, groups, differ=are_sharded).sqrt().unbind())
    if not are_averaged and norms:
        norms = list(norm_over_replicas(torch.stack(norms), groups.data).unbind())
    factor = 1.0 if scale is None else 1.0 / scale
    return {names[id(parameter)]: norm * factor for (parameter, _), norm in zip(owned, norms, strict=True)}


def _summed_over_parts(
    values: Tensor, parameters: Sequence[Parameter], groups: Groups, *, differ: bool
) -> Tensor:
    """Return the sum of a number of each parameter over the ranks with other parts of it. Collective.

    Args:
        values: one for each parameter; may be changed.
        parameters: the parameters.
        groups: this rank's process groups.
        differ: each data-parallel rank has another part of every parameter.
    """
    if differ:
        values = all_reduce(values, groups.data)
    experts = [] if differ else [index for index, each in enumerate(parameters) if is_expert(each)]
    split = [index for index, each in enumerate(parameters) if split_dim_of(each) is not None]
    for places, group in ((experts, groups.experts), (split, groups.model)):
        if places:
            values[places] = all_reduce(values[places], group)
    return values


def _without_padding(parameter: Parameter, gradient: Tensor) -> Tensor:
    slices = parameter.logical.slices  # type: ignore[attr-defined]
    return gradient[tuple(slice(stop - start) for start, stop in slices)]


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, in float32 for 16-bit ones."""
    if not gradients:
        return []
    return list(foreach_norm(gradients, 2, dtype=torch.promote_types(gradients[0].dtype, torch.float32)))


def _counts_here(parameter: Parameter, model: Group) -> bool:
    if is_stage_copy(parameter):
        return False
    return model.rank == 0 or getattr(parameter, "model_parallel", False)
