"""Build the list of layers as a plain module, with every layer on this rank."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from neox_model.assembly.activation_checkpointing import Recomputation, run_layers
from neox_model.assembly.autocast import Autocast
from neox_model.assembly.plan import LayerPlan, share_parameters

__all__ = ["SequentialModel", "as_sequential"]


class SequentialModel(nn.Module):
    """A model, or consecutive layers of it, that runs its layers in order.

    If a layer shares parameters with one that is not in the plan, it has parameters of its own, with the
    logical names of those.

    Attributes:
        plan_names: logical name of each path in this module.
        loss_fn: function of (logits_BSV, (labels_BS, loss_mask_BS)).
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
        self.stack = nn.ModuleList()
        self.plan_names = {f"stack.{index}": layer.name for index, layer in enumerate(plan)}
        built: dict[str, nn.Module] = {}
        owned = {layer.name: layer for layer in (*owners, *plan) if layer.tied == layer.name}
        for index, layer in enumerate(plan):
            shared: dict[str, Any] = {}
            if layer.tied is not None and layer.tied != layer.name:
                path = owned[layer.tied].tied_weight
                if layer.tied in built:
                    shared["weight"] = attrgetter(path)(built[layer.tied])
                else:
                    self.plan_names[f"stack.{index}.{layer.tied_weight}"] = f"{layer.tied}.{path}"
            built[layer.name] = layer.cls(**layer.kwargs, **shared)
            if layer.shares is not None and layer.shares != layer.name:
                if layer.shares in built:
                    share_parameters(built[layer.name], built[layer.shares])
                else:
                    built[layer.shares] = built[layer.name]
                    self.plan_names[f"stack.{index}"] = layer.shares
            self.stack.append(built[layer.name])

    def forward(
        self, inputs: Tensor | tuple[Tensor, ...], targets: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return logits_BSV of the embedding's inputs (see Embedding), or the loss if targets are given.

        The loss is that of `loss_fn(logits_BSV, targets)`, computed by the head without storing all logits.
        """
        *body, head = self.stack
        with self.autocast():
            hidden_SBD = run_layers(body, inputs, recomputation=self.recomputation if self.training else None)
            return head(hidden_SBD) if targets is None else head(hidden_SBD, targets, self.loss_fn)


def as_sequential(
    plan: Sequence[LayerPlan],
    *,
    loss_fn: Callable[..., Tensor],
    recomputation: Recomputation | None = None,
    autocast: Autocast = nullcontext,
    owners: Sequence[LayerPlan] = (),
) -> SequentialModel:
    """Build every layer of the plan, with uninitialized weights.

    Args:
        plan: the model as a list of layers.
        loss_fn: stored as the model's `loss_fn`.
        recomputation: recomputes segments of layers; None stores all activations.
        autocast: context of every forward pass.
        owners: layers that are built elsewhere, and may own weights that layers of the plan share.
    """
    return SequentialModel(
        plan, loss_fn=loss_fn, recomputation=recomputation, autocast=autocast, owners=owners
    )
