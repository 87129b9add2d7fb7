"""The description of a layer that has not been built; a model is a list of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["LayerPlan", "share_parameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The description of one layer of the model.

    Attributes:
        name: logical prefix of its parameters ("embedding", "layers.12", "final_norm", "lm_head").
        cls: its class.
        kwargs: plain values, groups and factories (functools.partial), but no modules, so that a plan uses no
            memory for weights.
        tied: name of the layer that owns the weight shared with this one; the owner has its own name here.
        tied_weight: path of that weight in this layer.
        shares: name of the earlier layer all of whose parameters this one uses; that layer has its own name
            here. None if layers do not share parameters.
    """

    name: str
    cls: type[nn.Module]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tied: str | None = None
    tied_weight: str = ""
    shares: str | None = None


def share_parameters(module: nn.Module, owner: nn.Module) -> None:
    """Replace the parameters of `module` by those of `owner`, a module of the same structure."""
    for path, parameter in list(owner.named_parameters()):
        holder, _, name = path.rpartition(".")
        setattr(module.get_submodule(holder), name, parameter)
