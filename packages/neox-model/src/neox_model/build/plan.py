"""A layer that is still to be built: what the model is a list of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["LayerPlan", "share_parameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer of the model, not yet built.

    Attributes:
        name: logical prefix of its parameters ("embedding", "layers.12", "final_norm", "lm_head").
        cls: its class.
        kwargs: plain values, groups and factories (functools.partial); no module, so that a plan costs
            nothing.
        tied: name of the layer with which it shares a weight; its own name for the one that owns it.
        tied_weight: path of that weight in this layer.
        shares: name of the earlier layer whose parameters, all of them, this one uses; its own name for that
            layer; None where every layer has its own.
    """

    name: str
    cls: type[nn.Module]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tied: str | None = None
    tied_weight: str = ""
    shares: str | None = None


def share_parameters(module: nn.Module, owner: nn.Module) -> None:
    """Put the parameters of `owner`, a module of the same parts, in the place of `module`'s own."""
    for path, parameter in list(owner.named_parameters()):
        holder, _, name = path.rpartition(".")
        setattr(module.get_submodule(holder), name, parameter)
