"""The list of layers as a DeepSpeed pipeline: this rank's stage alone is built.

A tied head becomes, on the last stage, a small layer that holds a copy of the owner's weight; DeepSpeed
sums the two gradients after each batch, so the copies stay equal. Activations are recomputed by our own
segments (see activation_checkpointing), so DeepSpeed's interval stays 0.
"""

import contextlib
import io
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neox_model.build.activation_checkpointing import Recomputation, run_layers
from neox_model.build.plan import LayerPlan, share_parameters
from neox_model.errors import LayoutError
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead, LMLoss
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.sequence import enter_split

__all__ = ["PipelineModel", "as_pipeline"]

logger = logging.getLogger(__name__)


class PipelineModel(PipelineModule):
    """One stage of the model.

    Attributes:
        plan_names: which logical name each path in this module has.
        loss_fn: function of (hidden_SBD, (labels_BS, loss_mask_BS)), used on the last stage: it has the
            output matrix and makes no more logits at a time than it needs.
    """

    def __init__(
        self,
        plan: Sequence[LayerPlan],
        groups: Groups,
        *,
        loss: LMLoss,
        partition_method: str,
        recomputation: Recomputation | None,
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
        if self._local_stop == len(plan):
            self.loss_fn = partial(_loss_of_hidden, loss, self.forward_funcs.pop())
        self.recomputation = recomputation
        self._sums_ties = True
        self._give_shared_layers_their_own_modules(plan)
        self.plan_names = _plan_names(plan, self._local_start, self._local_stop)
        _count_once_in_norms(self, groups)

    def _give_shared_layers_their_own_modules(self, plan: Sequence[LayerPlan]) -> None:
        """DeepSpeed uses one module for all layers of a stage that are tied; layers differ in other things.

        It sums the gradients of tied weights that it knows the paths of; these are only known now.
        """
        seen: set[str] = set()
        for place, layer in enumerate(plan[self._local_start : self._local_stop]):
            if layer.shares is None:
                continue
            key = _key(layer.shares)
            first = self.tied_modules[key]
            if key in seen:
                own = layer.cls(**layer.kwargs)
                share_parameters(own, first)
                self.add_module(f"shared_{self._local_start + place}", own)
                self.forward_funcs[place] = own
            elif key in self.tied_comms:
                self.tied_comms[key]["weight_attr"] = [path for path, _ in first.named_parameters()]
            seen.add(key)

    def take_over_ties(self) -> list[tuple[nn.Parameter, ProcessGroup]]:
        """Return this stage's tied weights, each with the group that sums its gradients.

        DeepSpeed sums none of them from then on.
        """
        ties = super().get_tied_weights_and_groups()
        self._sums_ties = False
        return ties

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, ProcessGroup]]:
        """Tied weights whose gradients DeepSpeed sums after each batch."""
        return super().get_tied_weights_and_groups() if self._sums_ties else []

    def forward(self, inputs: Any) -> Any:
        """What this stage makes of what the stage before sent (the first stage: of the tokens)."""
        return run_layers(
            self.forward_funcs, inputs, recomputation=self.recomputation if self.training else None
        )


def as_pipeline(
    plan: Sequence[LayerPlan],
    groups: Groups,
    *,
    loss: LMLoss,
    partition_method: str,
    recomputation: Recomputation | None = None,
) -> PipelineModel:
    """Build this rank's stage of the plan, weights allocated and not filled; collective over all ranks.

    Args:
        plan: the model.
        groups: this job's.
        loss: what the last stage compares with.
        partition_method: "parameters", "uniform" or "type:REGEX" over the layers' class names.
        recomputation: how segments of layers are recomputed; None keeps all activations.

    Raises:
        LayoutError: fewer layers than stages, or a regex that matches none.
    """
    if len(plan) < groups.pipe.size:
        raise LayoutError(
            f"{groups.pipe.size} pipeline stages, but the model has only {len(plan)} layers in all "
            "(embedding, norm and head included); choose a smaller pipe-parallel-size"
        )
    printed = io.StringIO()
    # DeepSpeed prints its partition; standard output belongs to results.
    with contextlib.redirect_stdout(printed):
        model = PipelineModel(
            plan,
            groups,
            loss=loss,
            partition_method=partition_method,
            recomputation=recomputation,
        )
    logger.debug("DeepSpeed's pipeline: %s", printed.getvalue().strip())
    bounds = list(zip(model.parts, model.parts[1:], strict=False))
    if any(start == stop for start, stop in bounds):
        raise LayoutError(
            f"pipe-partition-method {partition_method!r} leaves a stage without layers (each stage's first "
            f"layer and the next one's: {bounds}); choose another method or a smaller pipe-parallel-size"
        )
    logger.info(
        "pipeline stages by %r: %s",
        partition_method,
        ", ".join(f"{plan[start].name}..{plan[stop - 1].name}" for start, stop in bounds),
    )
    return model


def _key(layer: str) -> str:
    """DeepSpeed's name of what is tied to a layer: a module's name has no dots."""
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
    loss: LMLoss, head: Embedding | LMHead, hidden_SBD: Tensor, targets: tuple[Tensor, Tensor]
) -> Tensor:
    """The loss, whether this stage holds the head, a copy of its weight, or the embedding it is tied to."""
    holder = head.word_embeddings if isinstance(head, Embedding) else head
    return loss.of_hidden(enter_split(hidden_SBD, holder.group), holder.weight, targets)


def _plan_names(plan: Sequence[LayerPlan], start: int, stop: int) -> dict[str, str]:
    """Logical names by path, as DeepSpeed names the modules: by place in the list, or by tie."""
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


def _count_once_in_norms(model: PipelineModel, groups: Groups) -> None:
    """Mark each parameter so that DeepSpeed's norms count every logical tensor exactly once.

    Its norms run over stages and tensor-parallel ranks together and, without ZeRO, count parameters that
    lack `model_parallel` on the first rank of all only: the other stages' norms and biases would be left
    out, and a tied copy counted twice.
    """
    for _, parameter in named_logical_parameters(model):
        is_split = parameter.logical.model_parallel  # type: ignore[attr-defined]
        is_copy = parameter.ds_pipe_replicated  # type: ignore[attr-defined]
        parameter.model_parallel = (is_split or groups.model.rank == 0) and not is_copy  # type: ignore[attr-defined]
