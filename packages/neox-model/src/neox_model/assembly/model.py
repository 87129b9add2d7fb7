"""Build the model from configuration, as an ordered list of layers.

    embedding, layers.0 .. layers.N-1, final_norm, lm_head

With objective: ict the last one is retrieval_head, and there are two such lists, or a shared one.

The list becomes a plain module or a pipeline, whose parameters are initialized by logical name: the same
configuration and random seed give the same model on every layout.
"""

import importlib
import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from neox_config import NeoXConfig, Resolved
from neox_config.derive.objective import is_retrieval
from neox_config.derive.pipeline import chunks_per_stage, runs_torch_pipeline, splits_backward
from neox_config.derive.recomputation import gathers_inputs_again
from neox_config.facts.pipeline_schedules import SCHEDULES
from neox_config.facts.vocabulary import pad_vocabulary
from neox_model.assembly.activation_checkpointing import build_recomputation, passes_in_flight
from neox_model.assembly.as_sequential import SequentialModel, as_sequential
from neox_model.assembly.as_stages import StagedModel, as_stages
from neox_model.assembly.attention import build_input_position, log_attention_paths
from neox_model.assembly.autocast import build_autocast
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.assembly.compression import attach_compression
from neox_model.assembly.operators import choose_loss_operator, choose_operators
from neox_model.assembly.plan import LayerPlan
from neox_model.assembly.towers import BLOCK, QUERY, SHARED, TowerModel
from neox_model.assembly.transformer import build_layer, build_norm, init_method
from neox_model.assembly.zero_sharding import (
    gathered_parameter,
    is_partitioned_by_torch,
    partition_model,
    partitioned_as_built,
)
from neox_model.errors import LayoutError
from neox_model.initialization import initialize_parameters
from neox_model.layers.attention import DocumentMasks
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead, LMLoss
from neox_model.layers.retrieval import RetrievalHead, RetrievalLoss
from neox_model.parallel.cross_entropy import LossOperator
from neox_model.parallel.groups import Group, Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.low_rank import freeze_all_but_adapters

if TYPE_CHECKING:
    from neox_model.assembly.as_pipeline import PipelineModel

    Model = SequentialModel | PipelineModel | StagedModel | TowerModel

__all__ = [
    "LayerPlan",
    "build_model",
    "build_plan",
    "build_stage",
    "padded_vocab_size",
]

logger = logging.getLogger(__name__)


def padded_vocab_size(config: NeoXConfig, vocab_size: int) -> int:
    """Return the size of the logical vocabulary, given that of the tokenizer."""
    return pad_vocabulary(vocab_size, config.model.make_vocab_size_divisible_by)


def build_plan(
    resolved: Resolved, groups: Groups, *, vocab_size: int, device: torch.device | str = "cpu"
) -> list[LayerPlan]:
    """Return the model as a list of layers, without building them. Collective over all ranks.

    Args:
        resolved: the configuration.
        groups: this job's process groups.
        vocab_size: the tokenizer's vocabulary size.
        device: device of the layers.

    Raises:
        LayoutError: sizes do not divide.
        ModelError: a configured value has no implementation.
        KernelUnavailable: a requested fused operator cannot be used.
    """
    config = resolved.config
    init = init_method(config)
    splits_sequence = config.parallelism.sequence_parallel and groups.model.size > 1
    keeps_gathered = not gathers_inputs_again(config)
    group = replace(groups.model, splits_sequence=splits_sequence, keeps_gathered=keeps_gathered)
    vocabulary = {
        "vocab_size": padded_vocab_size(config, vocab_size),
        "hidden_size": config.model.hidden_size,
        "init": init,
        "group": group,
    }
    owner = None if config.model.no_weight_tying or is_retrieval(config) else "embedding"
    operators = choose_operators(
        resolved, groups, device=torch.device(device), dtype=DTYPES[resolved.derived.precision]
    )
    norm_class, norm_kwargs = build_norm(config, operators, group)
    embedding = LayerPlan(
        name="embedding",
        cls=Embedding,
        kwargs={
            **vocabulary,
            "position": build_input_position(config, init, group),
            "dropout": config.model.hidden_dropout,
        },
        tied=owner,
        tied_weight="word_embeddings.weight",
    )
    log_attention_paths(resolved, operators)
    masks = DocumentMasks(_passes(resolved, groups))
    layers, owners = [], resolved.derived.weight_owners
    for index in range(config.model.num_layers):
        cls, kwargs = build_layer(resolved, index, group=group, operators=operators, masks=masks)
        shares = None if owners is None else f"layers.{owners[index]}"
        layers.append(LayerPlan(name=f"layers.{index}", cls=cls, kwargs=kwargs, shares=shares))
    norm = LayerPlan(name="final_norm", cls=norm_class, kwargs=norm_kwargs)
    head = LayerPlan(name="lm_head", cls=LMHead, kwargs=vocabulary, tied=owner, tied_weight="weight")
    if is_retrieval(config):
        sizes = {"size": config.objective.ict_head_size, "hidden_size": config.model.hidden_size}
        head = LayerPlan(
            name="retrieval_head", cls=RetrievalHead, kwargs={**sizes, "init": init, "group": group}
        )
    return [embedding, *layers, norm, head]


def _passes(resolved: Resolved, groups: Groups) -> int:
    """Return the most forward passes through the layers that wait for their backward pass."""
    config = resolved.config
    towers = len(_tower_names(config)) if is_retrieval(config) else 1
    return passes_in_flight(resolved, groups) * towers


def _tower_names(config: NeoXConfig) -> tuple[str, ...]:
    return (SHARED,) if config.objective.ict_shared_towers else (QUERY, BLOCK)


def build_model(resolved: Resolved, groups: Groups, *, vocab_size: int) -> "Model":
    """Build this rank's part of the model and initialize its parameters. Collective over all ranks.

    The plain model maps `tokens_BS` (or a tuple, see Embedding) to `logits_BSV` of this rank's part of the
    vocabulary, or, given `(labels_BS, loss_mask_BS)` too, to the loss, without storing all logits. A
    pipeline's last stage returns hidden states, which its `loss_fn` maps to the loss.

    Args:
        resolved: the configuration.
        groups: this job's process groups.
        vocab_size: the tokenizer's vocabulary size.

    Raises:
        LayoutError: sizes do not divide.
        ModelError: a configured value has no implementation.
        KernelUnavailable: a requested fused operator cannot be used.
    """
    config = resolved.config
    device = computing_device()
    # Initialize weights where they are allocated: generators of host and device give different numbers.
    on_host = config.model.use_cpu_initialization or config.parallelism.lazy_mpu_init
    plan = build_plan(resolved, groups, vocab_size=vocab_size, device=device)
    entries = padded_vocab_size(config, vocab_size)
    operator = choose_loss_operator(resolved, groups, device=device, vocab_size=entries)
    loss = _loss(config, groups.model, vocab_size, operator=operator)
    with torch.device("cpu") if on_host else device:
        model = _assemble(plan, resolved, groups, loss)
    freeze_all_but_adapters(model)
    if is_partitioned_by_torch(resolved, groups):
        partition_model(resolved, model, groups)
    initialize_parameters(
        model,
        config.training.seed,
        on_cpu=on_host,
        writable=partial(gathered_parameter, groups=groups),
    )
    _log_share(model, groups)
    return model


def build_stage(resolved: Resolved, groups: Groups, *, vocab_size: int) -> SequentialModel:
    """Build this stage's layers for generation, with uninitialized weights. Collective over all ranks.

    The transformer layers are divided evenly; the embedding is on the first stage, the head on the last one.

    Args:
        resolved: the configuration, without ZeRO and sequence parallelism.
        groups: this job's process groups.
        vocab_size: the tokenizer's vocabulary size.

    Raises:
        LayoutError: sizes do not divide, or there are fewer layers than stages.
        ModelError: a configured value has no implementation.
        KernelUnavailable: a requested fused operator cannot be used.
    """
    device, pipe, num_layers = computing_device(), groups.pipe, resolved.config.model.num_layers
    if num_layers < pipe.size:
        raise LayoutError(
            f"there are {pipe.size} pipeline stages, but the model has only {num_layers} layers; "
            "set a smaller pipe-parallel-size"
        )
    plan = build_plan(resolved, groups, vocab_size=vocab_size, device=device)
    start = 0 if pipe.rank == 0 else 1 + pipe.rank * num_layers // pipe.size
    stop = len(plan) if pipe.rank == pipe.size - 1 else 1 + (pipe.rank + 1) * num_layers // pipe.size
    with device:
        model = as_sequential(
            plan[start:stop],
            loss_fn=_loss(resolved.config, groups.model, vocab_size),
            autocast=build_autocast(resolved, device),
            owners=plan[:start],
        )
        attach_compression(model, resolved.config, in_forward=True)
    freeze_all_but_adapters(model)
    _log_share(model, groups)
    return model


def _loss(
    config: NeoXConfig, group: Group, vocab_size: int, *, operator: LossOperator | None = None
) -> LMLoss:
    return LMLoss(
        padded_vocab_size(config, vocab_size),
        group,
        operator=operator,
        keeps_gradients=splits_backward(config),
        dtype=torch.float16 if config.precision.fp16_lm_cross_entropy else None,
    )


def _assemble(plan: list[LayerPlan], resolved: Resolved, groups: Groups, loss_fn: LMLoss) -> "Model":
    with partitioned_as_built(resolved, groups):
        model = _layers(plan, resolved, groups, loss_fn)
        attach_compression(model, resolved.config)
    return model


def _layers(plan: list[LayerPlan], resolved: Resolved, groups: Groups, loss_fn: LMLoss) -> "Model":
    config = resolved.config
    recomputation = build_recomputation(resolved, groups, passes=_passes(resolved, groups))
    autocast = build_autocast(resolved, computing_device())
    if runs_torch_pipeline(config):
        with partitioned_as_built(resolved, groups):
            return as_stages(
                plan,
                groups,
                chunks=chunks_per_stage(config),
                placement=SCHEDULES[config.parallelism.pipeline_schedule].placement,
                loss=loss_fn,
                partition_method=config.parallelism.pipe_partition_method,
                recomputation=recomputation,
                autocast=autocast,
            )
    if resolved.derived.uses_pipeline:
        # Imported by name: DeepSpeed, whose pipeline it is, takes seconds to import.
        pipeline: PipelineModel = importlib.import_module("neox_model.assembly.as_pipeline").as_pipeline(
            plan,
            groups,
            loss=loss_fn,
            partition_method=config.parallelism.pipe_partition_method,
            recomputation=recomputation,
            autocast=autocast,
        )
        return pipeline
    if is_retrieval(config):
        loss = RetrievalLoss(groups.data, best=config.objective.report_topk_accuracies)
        towers = {
            name: as_sequential(plan, loss_fn=loss, recomputation=recomputation, autocast=autocast)
            for name in _tower_names(config)
        }
        return TowerModel(towers, loss_fn=loss)
    return as_sequential(plan, loss_fn=loss_fn, recomputation=recomputation, autocast=autocast)


def _log_share(model: nn.Module, groups: Groups) -> None:
    """Log the number of parameters on this rank, unless it holds the whole model."""
    if groups.model.size * groups.pipe.size == 1:
        return
    held = 0
    for _, parameter in named_logical_parameters(model):
        held += math.prod(stop - start for start, stop in parameter.logical.slices)  # type: ignore[attr-defined]
    logger.info(
        "%s parameters on this rank (tensor-parallel rank %d of %d, stage %d of %d)",
        f"{held:,}",
        groups.model.rank,
        groups.model.size,
        groups.pipe.rank,
        groups.pipe.size,
    )
