"""Build the list of layers as a DeepSpeed pipeline, only this rank's stage.

A tied head becomes, on the last stage, a small layer with a copy of the owner's weight. DeepSpeed sums the
two gradients after each batch, so the copies stay equal. Our own segments recompute activations (see
activation_checkpointing), so DeepSpeed's interval stays 0.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neox_config.spec.run import Layout
from neox_model.assembly.activation_checkpointing import Recomputation, run_layers
from neox_model.assembly.as_sequential import LayerPlan, share_parameters
from neox_model.assembly.choices import Autocast
from neox_model.assembly.partition import partition
from neox_model.engine.deepspeed.compat import mark_stage_copies, sum_tied_weights
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead, LMLoss
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import is_stage_copy, named_logical_parameters
from neox_model.parallel.sequence import to_column_parallel

__all__ = ["PipelineModel", "build_stages"]

logger = logging.getLogger(__name__)


class PipelineModel(PipelineModule):
    """One stage of the model.

    Attributes:
        plan_names: logical name of each path in this module.
        loss_fn: function of (hidden_SBD, (labels_BS, loss_mask_BS)), used on the last stage: it has the
            output matrix and computes only part of the logits at a time.
    """

    def __init__(
        self,
        plan: Sequence[LayerPlan],
        groups: Groups,
        *,
        loss: LMLoss,
        partition_method: str,
        recomputation: Recomputation | None,
        autocast: Autocast = contextlib.nullcontext,
    ) -> None:
        topology = PipeModelDataParallelTopology(
            num_pp=groups.pipe.size, num_mp=groups.model.size, num_dp=groups.data.size
        )
        super().__init__(
            layers=[_spec(layer) for layer in plan],
            topology=topology,
            loss_fn=loss,
            partition_method=partition_method,
        )
        start, stop = self.parts[self.stage_id : self.stage_id + 2]
        if stop == len(plan):
            head = self.forward_funcs.pop()
            self.loss_fn: Callable[..., Tensor] = partial(_loss_of_hidden, loss, head, autocast)
        self.recomputation = recomputation
        self.autocast = autocast
        self._sums_ties = True
        self._give_shared_layers_their_own_modules(plan, start, stop)
        self.plan_names = _plan_names(plan, start, stop)
        mark_stage_copies(self)
        # DeepSpeed's norms run over stages and tensor-parallel ranks and, without ZeRO, count parameters
        # without `model_parallel` on the first rank only, which omits the norms and biases of other stages,
        # and counts a tied copy twice. With this mark they count every logical tensor exactly once.
        for _, parameter in named_logical_parameters(self):
            is_counted = parameter.logical.model_parallel or groups.model.rank == 0  # type: ignore[attr-defined]
            parameter.model_parallel = is_counted and not is_stage_copy(parameter)  # type: ignore[attr-defined]

    def _give_shared_layers_their_own_modules(self, plan: Sequence[LayerPlan], start: int, stop: int) -> None:
        """Create a module per layer that shares parameters with others of this stage.

        DeepSpeed uses one module for all tied layers of a stage, but the layers differ in other settings. It
        sums the gradients of tied weights by path; the paths are only known now.
        """
        seen: set[str] = set()
        for place, layer in enumerate(plan[start:stop]):
            if layer.shares is None:
                continue
            key = _key(layer.shares)
            first = self.tied_modules[key]
            if key in seen:
                own = layer.cls(**layer.kwargs)
                share_parameters(own, first)
                self.add_module(f"shared_{start + place}", own)
                self.forward_funcs[place] = own
            else:
                sum_tied_weights(self, key, [path for path, _ in first.named_parameters()])
            seen.add(key)

    def guard_losses(self, guard: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the loss that the last stage computes for each micro-batch."""
        loss_of = self.loss_fn
        self.loss_fn = lambda hidden_SBD, targets: guard(loss_of(hidden_SBD, targets))

    def take_over_ties(self) -> list[tuple[nn.Parameter, ProcessGroup]]:
        """Return this stage's tied weights, each with the group that sums its gradients.

        DeepSpeed sums none of these gradients afterwards.
        """
        ties = self.get_tied_weights_and_groups()
        self._sums_ties = False
        return ties

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, ProcessGroup]]:
        """Return the tied weights whose gradients DeepSpeed sums after each batch; frozen ones have none."""
        ties = super().get_tied_weights_and_groups() if self._sums_ties else []
        return [tie for tie in ties if tie[0].requires_grad]

    def forward(self, inputs: Any) -> Any:
        """Run this stage on the output of the previous stage (the first stage: on the tokens)."""
        with self.autocast():
            return run_layers(
                self.forward_funcs, inputs, recomputation=self.recomputation if self.training else None
            )


def build_stages(
    plan: Sequence[LayerPlan],
    groups: Groups,
    layout: Layout,
    *,
    loss: LMLoss,
    recomputation: Recomputation | None = None,
    autocast: Autocast = contextlib.nullcontext,
) -> PipelineModel:
    """Build this rank's stage of the plan, with uninitialized weights. Collective over all ranks.

    Args:
        plan: the model as a list of layers.
        groups: this job's process groups.
        layout: how the layers are divided into stages.
        loss: the loss of the last stage.
        recomputation: recomputes segments of layers; None stores all activations.
        autocast: context of every forward pass, and of the loss.

    Raises:
        LayoutError: there are fewer layers than stages, or the regex matches no layer.
    """
    bounds = partition(plan, groups.pipe.size, layout.partition)
    printed = io.StringIO()
    # DeepSpeed prints its partition, but standard output is for results.
    with contextlib.redirect_stdout(printed):
        model = PipelineModel(
            plan,
            groups,
            loss=loss,
            partition_method=layout.partition,
            recomputation=recomputation,
            autocast=autocast,
        )
    logger.debug("DeepSpeed's pipeline: %s", printed.getvalue().strip())
    logger.info(
        "pipeline stages (partition method %r): %s",
        layout.partition,
        ", ".join(f"{plan[start].name}..{plan[stop - 1].name}" for start, stop in bounds),
    )
    return model


def _key(layer: str) -> str:
    """Return DeepSpeed's key of a tied layer; module names must not contain dots."""
    return layer.replace(".", "_")


def _spec(layer: LayerPlan) -> LayerSpec:
    if layer.shares is not None:
        return TiedLayerSpec(_key(layer.shares), layer.cls, tied_weight_attr=[], **layer.kwargs)
    if layer.tied is None:
        return LayerSpec(layer.cls, **layer.kwargs)
    return TiedLayerSpec(
        layer.tied,
        layer.cls,
        tied_weight_attr=layer.tied_weight,
        **layer.kwargs,
    )


def _loss_of_hidden(
    loss: LMLoss,
    head: Embedding | LMHead,
    autocast: Autocast,
    hidden_SBD: Tensor,
    targets: tuple[Tensor, Tensor],
) -> Tensor:
    """Compute the loss with the head, a copy of its weight, or the embedding that it is tied to."""
    holder = head.word_embeddings if isinstance(head, Embedding) else head
    with autocast():
        return loss.of_hidden(to_column_parallel(hidden_SBD, holder.group), holder.weight, targets)


def _plan_names(plan: Sequence[LayerPlan], start: int, stop: int) -> dict[str, str]:
    """Return logical names by DeepSpeed's module path: the index in the list, or the key of a tied layer."""
    owners = {layer.name: layer for layer in plan if layer.tied == layer.name}
    names: dict[str, str] = {}
    for index in range(start, stop):
        layer = plan[index]
        path = f"tied_modules.{layer.tied}"
        if layer.shares is not None:
            names[f"tied_modules.{_key(layer.shares)}"] = layer.shares
        elif layer.tied is None:
            names[str(index)] = layer.name
        elif layer.tied == layer.name:
            names[path] = layer.name
        elif path not in names:
            names[f"{path}.{layer.tied_weight}"] = f"{layer.tied}.{owners[layer.tied].tied_weight}"
    return names
