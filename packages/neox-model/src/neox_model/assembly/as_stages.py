"""Build the list of layers as chunks of a pipeline stage, for the schedules of torch.distributed.pipelining.

The list is divided into parts; a stage holds one or several of them, its chunks. Layers of one rank that
share weights share the parameter; across ranks each has a copy, whose gradients are summed after the backward
passes of a batch (`StagedModel.take_over_ties`), so that the copies stay equal.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neox_config.facts.pipeline_schedules import Placement, stage_of_part
from neox_config.spec.run import Layout
from neox_model.assembly.activation_checkpointing import Recomputation, run_layers
from neox_model.assembly.as_sequential import LayerPlan, build_layers
from neox_model.assembly.choices import Autocast
from neox_model.assembly.partition import partition
from neox_model.layers.lm_head import LMLoss
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.groups import Groups
from neox_model.parallel.topology import group_of_stages

__all__ = ["Chunk", "StagedModel", "build_stages"]

logger = logging.getLogger(__name__)


class Chunk(nn.Module):
    """Consecutive layers of a stage.

    Args:
        layers: modules, shared with nothing but their parameters.
        part: number of this part of the model, from 0.
        is_last: the last layer is the head, and the chunk returns the loss.
        loss: computes the loss of the head's inputs.
        recomputation: recomputes segments of layers; None stores all activations.
        autocast: context of every forward pass.
        takes_documents: the inputs contain document ids, if the micro-batches do.
        gives_documents: the outputs contain them too.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        part: int,
        is_last: bool,
        loss: LMLoss,
        recomputation: Recomputation | None,
        autocast: Autocast,
        takes_documents: bool,
        gives_documents: bool,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.part = part
        self.is_last = is_last
        self.takes_documents = takes_documents
        self.gives_documents = gives_documents
        self._loss = loss
        self._recomputation = recomputation
        self._autocast = autocast

    def forward(
        self, *inputs: Tensor, labels_BS: Tensor | None = None, loss_mask_BS: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the input of the next chunk; the last chunk returns the loss of the targets.

        Args:
            inputs: those of the model (see Embedding), or the outputs of the previous chunk.
            labels_BS: given to all chunks of a rank that has the last one.
            loss_mask_BS: the same.
        """
        given: Any = inputs if len(inputs) > 1 else inputs[0]
        recomputation = self._recomputation if self.training else None
        with self._autocast():
            if not self.is_last:
                return run_layers(list(self.layers), given, recomputation=recomputation)
            *body, head = self.layers
            hidden_SBD = run_layers(body, given, recomputation=recomputation)
            return head(hidden_SBD, (labels_BS, loss_mask_BS), self._loss)


class StagedModel(nn.Module):
    """The chunks of one stage.

    Attributes:
        chunks: this rank's parts of the model, in their order.
        stages: stage of each part of the model.
        plan_names: logical name of each path in this module.
        recomputation: recomputes segments of layers; None stores all activations.
        autocast: context of every forward pass, and of the loss.
    """

    def __init__(
        self,
        plan: Sequence[LayerPlan],
        groups: Groups,
        *,
        bounds: Sequence[tuple[int, int]],
        placement: Placement,
        loss: LMLoss,
        recomputation: Recomputation | None,
        autocast: Autocast,
    ) -> None:
        super().__init__()
        self.recomputation = recomputation
        self.autocast = autocast
        self.stages = tuple(
            stage_of_part(part, stages=groups.pipe.size, placement=placement) for part in range(len(bounds))
        )
        self._hidden_size: int = plan[0].kwargs["hidden_size"]
        model = plan[0].kwargs["group"]
        self._shares_of_sequence = model.size if model.splits_sequence else 1
        mine = [part for part, stage in enumerate(self.stages) if stage == groups.pipe.rank]
        paths = {
            index: f"chunks.{place}.layers.{index - bounds[part][0]}"
            for place, part in enumerate(mine)
            for index in range(*bounds[part])
        }
        layers, self.plan_names = build_layers(plan, paths)
        last_with_documents = max(
            index for index, layer in enumerate(plan) if issubclass(layer.cls, ResidualLayer)
        )
        self.chunks = nn.ModuleList(
            Chunk(
                [layers[index] for index in range(*bounds[part])],
                part=part,
                is_last=part == len(bounds) - 1,
                loss=loss,
                recomputation=recomputation,
                autocast=autocast,
                takes_documents=part > 0 and bounds[part][0] <= last_with_documents,
                gives_documents=bounds[part][1] <= last_with_documents,
            )
            for part in mine
        )
        # By path: ZeRO replaces the parameters.
        self._ties = self._join_ties(plan, bounds, layers, paths, groups)

    @property
    def holds_first(self) -> bool:
        """Return True if the stage holds the first part of the model."""
        return self.stages[0] == self.stages[self._first.part]

    @property
    def holds_last(self) -> bool:
        """Return True if the stage holds the last part of the model, which computes the loss."""
        return self.stages[-1] == self.stages[self._first.part]

    @property
    def layers(self) -> list[nn.Module]:
        """Return all layers of the stage, in their order."""
        return [layer for chunk in self.chunks for layer in chunk.layers]  # type: ignore[union-attr]

    def own_chunks(self) -> Iterator[Chunk]:
        """Yield the chunks, in the order of their parts of the model."""
        for chunk in self.chunks:
            assert isinstance(chunk, Chunk)
            yield chunk

    def sent_between(
        self, *, batch: int, length: int, has_documents: bool, dtype: torch.dtype
    ) -> list[Tensor]:
        """Return what one chunk passes to the next, as tensors without memory.

        Args:
            batch: sequences per micro-batch.
            length: tokens per sequence.
            has_documents: document ids follow the hidden states.
            dtype: dtype of the hidden states.
        """
        shape = (length // self._shares_of_sequence, batch, self._hidden_size)
        hidden_SBD = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        if not has_documents:
            return [hidden_SBD]
        return [hidden_SBD, torch.empty((batch, length), dtype=torch.long, device="meta")]

    def take_over_ties(self) -> list[tuple[nn.Parameter, ProcessGroup]]:
        """Return this stage's trained weights with copies on others, each with the group of their stages."""
        ties = [(self.get_parameter(path), group) for path, group in self._ties]
        return [tie for tie in ties if tie[0].requires_grad]

    @property
    def _first(self) -> Chunk:
        return next(self.own_chunks())

    def _join_ties(
        self,
        plan: Sequence[LayerPlan],
        bounds: Sequence[tuple[int, int]],
        layers: dict[int, nn.Module],
        paths: dict[int, str],
        groups: Groups,
    ) -> list[tuple[str, ProcessGroup]]:
        """Form the groups of stages with copies, in the order of the plan; mark copies. Collective."""
        part_of = [part for part, limits in enumerate(bounds) for _ in range(*limits)]
        users: dict[str, list[int]] = {}
        for index, layer in enumerate(plan):
            owner = layer.tied or layer.shares
            if owner is not None:
                users.setdefault(owner, []).append(index)
        joined: dict[tuple[int, ...], ProcessGroup | None] = {}
        ties: list[tuple[str, ProcessGroup]] = []
        for indices in users.values():
            holders = [self.stages[part_of[index]] for index in indices]
            members = tuple(sorted(set(holders)))
            if len(members) == 1:
                continue
            if members not in joined:
                joined[members] = group_of_stages(groups, members)
            mine = next((index for index in indices if index in layers), None)
            group = joined[members]
            if mine is None or group is None:
                continue
            tied, module = plan[mine].tied is not None, layers[mine]
            paths_in = [plan[mine].tied_weight] if tied else [path for path, _ in module.named_parameters()]
            for path in paths_in:
                parameter = module.get_parameter(path)
                parameter.is_stage_copy = holders[0] != groups.pipe.rank  # type: ignore[attr-defined]
                ties.append((f"{paths[mine]}.{path}", group))
        return ties


def build_stages(
    plan: Sequence[LayerPlan],
    groups: Groups,
    layout: Layout,
    *,
    loss: LMLoss,
    recomputation: Recomputation | None = None,
    autocast: Autocast = nullcontext,
) -> StagedModel:
    """Build this rank's chunks of the plan, with uninitialized weights. Collective over all ranks.

    Args:
        plan: the model as a list of layers.
        groups: this job's process groups.
        layout: chunks per stage, and which stage holds which part of the model.
        loss: the loss of the last chunk.
        recomputation: recomputes segments of layers; None stores all activations.
        autocast: context of every forward pass, and of the loss.

    Raises:
        LayoutError: there are fewer layers than chunks, or the regex matches no layer.
    """
    bounds = partition(plan, groups.pipe.size * layout.chunks, layout.partition)
    model = StagedModel(
        plan,
        groups,
        bounds=bounds,
        placement=layout.placement,
        loss=loss,
        recomputation=recomputation,
        autocast=autocast,
    )
    logger.info(
        "pipeline stages (partition method %r): %s",
        layout.partition,
        ", ".join(
            f"{plan[start].name}..{plan[stop - 1].name} on stage {stage}"
            for (start, stop), stage in zip(bounds, model.stages, strict=True)
        ),
    )
    return model
