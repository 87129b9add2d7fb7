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
    """A model that runs all layers in order.

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
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.autocast = autocast
        self.recomputation = recomputation
        self.stack = nn.ModuleList()
        self.plan_names = {f"stack.{index}": layer.name for index, layer in enumerate(plan)}
        built: dict[str, nn.Module] = {}
        owned = {layer.name: layer for layer in plan if layer.tied == layer.name}
        for layer in plan:
            shared: dict[str, Any] = {}
            if layer.tied is not None and layer.tied != layer.name:
                shared["weight"] = attrgetter(owned[layer.tied].tied_weight)(built[layer.tied])
            built[layer.name] = layer.cls(**layer.kwargs, **shared)
            if layer.shares is not None and layer.shares != layer.name:
                share_parameters(built[layer.name], built[layer.shares])
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
) -> SequentialModel:
    """Build every layer of the plan, with uninitialized weights.

    Args:
        plan: the model as a list of layers.
        loss_fn: stored as the model's `loss_fn`.
        recomputation: recomputes segments of layers; None stores all activations.
        autocast: context of every forward pass.
    """
    return SequentialModel(plan, loss_fn=loss_fn, recomputation=recomputation, autocast=autocast)
