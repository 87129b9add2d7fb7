"""Build the norms of layers, and those of queries and keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from neox_config.facts.norms import NORM_FACTS
from neox_config.spec.model import Attention, Norm
from neox_model.assembly.operators import Operators
from neox_model.layers.attention.head_norms import HeadNorms, over_ranks, rms_norm_of_heads
from neox_model.layers.norms import NORMS
from neox_model.parallel.groups import Group

__all__ = ["build_head_norms", "build_norm"]


def build_norm(
    norm: Norm, width: int, operators: Operators, group: Group
) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class of a norm and its keyword arguments."""
    arguments: dict[str, Any] = {
        "width": width,
        "epsilon": norm.epsilon,
        "group": group,
        "zero_centered": norm.zero_centered,
    }
    if NORM_FACTS[norm.kind].has_bias:
        arguments["bias"] = norm.bias
    if operators.norm is not None:
        arguments["operator"] = operators.norm
    if operators.norm_of_sum is not None:
        arguments["fused_add_norm"] = operators.norm_of_sum
    if operators.norm_with_input is not None:
        arguments["with_input"] = operators.norm_with_input
    return NORMS[norm.kind], arguments


def build_head_norms(mixer: Attention, norm: Norm | None, group: Group) -> Callable[[], HeadNorms] | None:
    """Return a factory of the norms of queries and keys; None if there are none.

    They use PyTorch's operators: the others were chosen for the model's width.

    Args:
        mixer: the attention.
        norm: the norm of its layer, of the kind of which these are; None: leave them out.
        group: the ranks over which the heads are split.
    """
    if mixer.qk_norm is None or norm is None:
        return None
    facts, cls = NORM_FACTS[norm.kind], NORMS[norm.kind]
    # Every rank has the whole sequence.
    group = replace(group, splits_sequence=False)
    of_each_head = mixer.qk_norm == "shared" and not facts.subtracts_mean
    joins_heads = mixer.qk_norm != "head" and not (of_each_head and facts.scalars)
    options: dict[str, Any] = {"is_split": joins_heads}
    if joins_heads:
        operator = partial(rms_norm_of_heads, mixer.head_width) if of_each_head else over_ranks(cls, group)
        options["operator"] = operator
    norms = {}
    for name, width in mixer.qk_norm_widths.items():
        _, arguments = build_norm(norm, width, Operators(), group)
        norms[name] = partial(cls, **arguments, **options)
    return partial(HeadNorms, norms, joins_heads=joins_heads, group=group)
