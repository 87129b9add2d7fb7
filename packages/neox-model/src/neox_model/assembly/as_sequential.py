"""The layers that a model is planned as, and their form as a plain module, with every layer on this rank."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from neox_model.assembly.activation_checkpointing import Recomputation, run_layers
from neox_model.assembly.choices import Autocast

__all__ = ["LayerPlan", "SequentialModel", "build_layers", "share_parameters"]


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


class SequentialModel(nn.Module):
    """A model, or consecutive layers of it, that runs its layers in order.

    If a layer shares parameters with one that is not in the plan, it has parameters of its own, with the
    logical names of those.

    Args:
        plan: the layers, built with uninitialized weights.
        loss_fn: function of (logits_BSV, (labels_BS, loss_mask_BS)).
        recomputation: recomputes segments of layers; None stores all activations.
        autocast: context of every forward pass.
        owners: layers that are built elsewhere, and may own weights that layers of the plan share.

    Attributes:
        plan_names: logical name of each path in this module.
        distillation: computes the loss in training with a teacher; None: there is none.
    """

    def __init__(
        self,
        plan: Sequence[LayerPlan],
        *,
        loss_fn: Callable[..., Tensor],
        recomputation: Recomputation | None = None,
        autocast: Autocast = nullcontext,
        owners: Sequence[LayerPlan] = (),
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.autocast = autocast
        self.recomputation = recomputation
        self.distillation: Any = None
        first = len(owners)
        paths = {first + place: f"stack.{place}" for place in range(len(plan))}
        layers, self.plan_names = build_layers([*owners, *plan], paths)
        self.stack = nn.ModuleList(layers.values())

    def forward(
        self, inputs: Tensor | tuple[Tensor, ...], targets: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return logits_BSV of the embedding's inputs (see Embedding), or the loss if targets are given.

        The loss is that of `loss_fn(logits_BSV, targets)`, computed by the head without storing all logits,
        and in training with a teacher that of `distillation`.
        """
        *body, head = self.stack
        recomputation = self.recomputation if self.training else None
        with self.autocast():
            if targets is not None and self.training and self.distillation is not None:
                return self.distillation.loss(
                    list(self.stack), inputs, targets, loss_fn=self.loss_fn, recomputation=recomputation
                )
            hidden_SBD = run_layers(body, inputs, recomputation=recomputation)
            return head(hidden_SBD) if targets is None else head(hidden_SBD, targets, self.loss_fn)


def build_layers(
    plan: Sequence[LayerPlan], paths: Mapping[int, str]
) -> tuple[dict[int, nn.Module], dict[str, str]]:
    """Build some layers of a plan; those that share weights share the parameters.

    If the layer that owns shared parameters is not built here, the layer gets a copy with the same logical
    names.

    Args:
        plan: the model as a list of layers.
        paths: indices of the layers to build, in order, each with its path in the module that will hold it.

    Returns:
        The layers by index, and the logical name of each path.
    """
    layers: dict[int, nn.Module] = {}
    names = {path: plan[index].name for index, path in paths.items()}
    owners = {layer.name: layer for layer in plan if layer.tied == layer.name}
    # The first layer that was built with the parameters of an owner, by the owner's name.
    built: dict[str, tuple[LayerPlan, nn.Module]] = {}
    for index, path in paths.items():
        layer = plan[index]
        shared: dict[str, Any] = {}
        if layer.tied is not None and layer.tied != layer.name:
            if layer.tied in built:
                first, module = built[layer.tied]
                shared["weight"] = attrgetter(first.tied_weight)(module)
            else:
                names[f"{path}.{layer.tied_weight}"] = f"{layer.tied}.{owners[layer.tied].tied_weight}"
        layers[index] = layer.cls(**layer.kwargs, **shared)
        owner = layer.shares or layer.tied
        if layer.shares is not None and layer.shares in built:
            share_parameters(layers[index], built[layer.shares][1])
        elif owner is not None and owner not in built:
            built[owner] = (layer, layers[index])
            if layer.shares is not None:
                names[path] = layer.shares
    return layers, names
