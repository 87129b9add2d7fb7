"""Gradients that are sums over tensor-parallel ranks: those of parameters that every rank holds whole.

Each rank computes its part of such a sum if it uses the parameter for its part of the sequence, or where the
gradients of several branches are summed over the ranks together. By default a hook sums each gradient when it
is computed. An engine whose gradients are used only once per step takes this over, and sums all of them in
one message.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from neox_model.parallel.collectives import all_reduce, summed_copy
from neox_model.parallel.gradient_reduction import in_buckets
from neox_model.parallel.groups import Group

__all__ = [
    "ensure_partial",
    "has_partial_gradient",
    "mark_partial",
    "sum_partial_gradients",
    "take_over_sums",
]


def mark_partial(parameter: nn.Parameter, group: Group) -> None:
    """Mark a parameter of which every rank of a group computes a part of the gradient, and sum the parts."""
    # Rows of the parameter that `fully_shard` makes are marked alike (copy_description); no hook sums these.
    parameter.partial_gradient = parameter.register_hook(partial(summed_copy, group=group))  # type: ignore[attr-defined]


def ensure_partial(parameter: nn.Parameter, group: Group) -> None:
    """Mark it, unless it is marked, as one of a group that splits the sequence is, or there is one rank."""
    if group.size > 1 and not has_partial_gradient(parameter):
        mark_partial(parameter, group)


def has_partial_gradient(parameter: Tensor) -> bool:
    """Return True for a parameter of which this rank computes a part of the gradient."""
    return hasattr(parameter, "partial_gradient")


def take_over_sums(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of these parameters stay parts, which the caller sums before it uses them."""
    for parameter in parameters:
        if has_partial_gradient(parameter):
            parameter.partial_gradient.remove()  # type: ignore[attr-defined]


@torch.no_grad()
def sum_partial_gradients(gradients: Sequence[Tensor], group: Group) -> None:
    """Sum gradients over the group in place, in one message for each dtype (and each 2^26 elements).

    Collective: every rank passes the same shapes in the same order.
    """
    if group.size > 1:
        in_buckets(gradients, lambda flat: all_reduce(flat, group))
