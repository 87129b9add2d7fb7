"""Build the model from configuration, as an ordered list of layers.

    embedding, layers.0 .. layers.N-1, final_norm, lm_head

With objective: ict the last one is retrieval_head, and there are two such lists, or a shared one.

The list becomes a plain module or a pipeline, whose parameters are initialized by logical name: the same
configuration and random seed give the same model on every layout.
"""

import importlib
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from neox_config.spec.model import ModelSpec, Retrieval, Vocabulary
from neox_config.spec.run import RunSpec
from neox_model.assembly.activation_checkpointing import build_recomputation, passes_in_flight
from neox_model.assembly.as_sequential import LayerPlan, SequentialModel
from neox_model.assembly.attention import build_input_position, log_attention_paths
from neox_model.assembly.choices import DTYPES, build_autocast, computing_device
from neox_model.assembly.engines import engine_module
from neox_model.assembly.norms import build_norm
from neox_model.assembly.operators import choose_loss_operator, choose_operators
from neox_model.assembly.transformer import build_init, build_layer
from neox_model.assembly.zero_sharding import (
    gathered_parameter,
    partition_model,
    partitioned_as_built,
)
from neox_model.errors import LayoutError
from neox_model.initialization import initialize_parameters
from neox_model.layers.attention import DocumentMasks
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead, LMLoss
from neox_model.layers.positions import RotaryTables
from neox_model.parallel.cross_entropy import LossOperator
from neox_model.parallel.groups import SINGLE_RANK, Group, Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.low_rank import freeze_all_but_adapters

__all__ = [
    "LayerPlan",
    "build_model",
    "build_plan",
    "build_stage",
]

logger = logging.getLogger(__name__)

# Class of a head other than the vocabulary -> module with `plan_head` and `assemble`.
HEADS: Mapping[type[Any], str] = {Retrieval: "neox_model.extras.retrieval.towers"}

# Field of a run that asks for it -> function of the model, the run and `trains`, called while the model is
# built, where new parameters are allocated like its own.
TRANSFORMS: Mapping[str, str] = {"compressible": "neox_model.extras.compression.attach:attach_compression"}


def build_plan(
    spec: ModelSpec,
    run: RunSpec,
    groups: Groups,
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> list[LayerPlan]:
    """Return the model as a list of layers, without building them. Collective over all ranks.

    Args:
        spec: the model.
        run: how it runs.
        groups: this job's process groups.
        vocab_size: the tokenizer's vocabulary size.
        device: device of the layers.

    Raises:
        LayoutError: sizes do not divide.
        KernelUnavailable: a requested fused operator cannot be used.
    """
    init, group = build_init(run, "vocabulary"), _splitting(run, groups)
    operators = choose_operators(
        spec, run, groups, device=torch.device(device), dtype=DTYPES[run.precision.weights]
    )
    owner = "embedding" if isinstance(spec.head, Vocabulary) and spec.head.tied else None
    vocabulary = {
        "vocab_size": spec.embedding.entries(vocab_size),
        "hidden_size": spec.width,
        "init": init,
        "group": group,
    }
    embedding = LayerPlan(
        name="embedding",
        cls=Embedding,
        kwargs={
            **vocabulary,
            "position": build_input_position(spec.embedding, spec.width, build_init(run, "position"), group),
            "scale": spec.embedding.scale,
            "dropout": run.dropout.hidden,
        },
        tied=owner,
        tied_weight="word_embeddings.weight",
    )
    log_attention_paths(spec.layers, run.batch, run.fusions, operators)
    masks, layers = DocumentMasks(_passes(spec, run, groups)), []
    tables: dict[Any, RotaryTables] = {}
    for index, layer in enumerate(spec.layers):
        cls, kwargs = build_layer(
            spec, index, run, group=group, operators=operators, masks=masks, tables=tables
        )
        shares = None if layer.owner is None else f"layers.{layer.owner}"
        layers.append(LayerPlan(name=f"layers.{index}", cls=cls, kwargs=kwargs, shares=shares))
    cls, kwargs = build_norm(spec.norm, spec.width, operators, group)
    norm = LayerPlan(name="final_norm", cls=cls, kwargs=kwargs)
    if type(spec.head) in HEADS:
        head = _head_module(spec).plan_head(spec.head, hidden_size=spec.width, init=init, group=group)
    else:
        kwargs = {**vocabulary, **_of_logits(spec)}
        head = LayerPlan(name="lm_head", cls=LMHead, kwargs=kwargs, tied=owner, tied_weight="weight")
    return [embedding, *layers, norm, head]


def _splitting(run: RunSpec, groups: Groups) -> Group:
    """Return the tensor-parallel ranks, with how they divide sequences."""
    return replace(
        groups.model,
        splits_sequence=run.layout.splits_sequence and groups.model.size > 1,
        keeps_gathered=not run.recomputation.gathers_inputs,
    )


def _passes(spec: ModelSpec, run: RunSpec, groups: Groups) -> int:
    """Return the most forward passes through the layers that wait for their backward pass."""
    return passes_in_flight(run.layout, run.batch.accumulation, groups.pipe) * spec.towers


def _head_module(spec: ModelSpec) -> Any:
    return importlib.import_module(HEADS[type(spec.head)])


def _transform(model: nn.Module, run: RunSpec, *, trains: bool) -> None:
    """Change the layers as the run asks for.

    Args:
        model: the model, or a part of it.
        run: how it runs.
        trains: False: it computes with given weights only.
    """
    for field, function in TRANSFORMS.items():
        if getattr(run, field):
            resolve_name(function)(model, run, trains=trains)


def build_model(spec: ModelSpec, run: RunSpec, groups: Groups, *, vocab_size: int) -> Any:
    """Build this rank's part of the model and initialize its parameters. Collective over all ranks.

    The plain model maps `tokens_BS` (or a tuple, see Embedding) to `logits_BSV` of this rank's part of the
    vocabulary, or, given `(labels_BS, loss_mask_BS)` too, to the loss, without storing all logits. A
    pipeline's last stage returns hidden states, which its `loss_fn` maps to the loss.

    Args:
        spec: the model.
        run: how it runs.
        groups: this job's process groups.
        vocab_size: the tokenizer's vocabulary size.

    Raises:
        LayoutError: sizes do not divide.
        KernelUnavailable: a requested fused operator cannot be used.
    """
    device, on_host = computing_device(), run.initialization.on_host
    plan = build_plan(spec, run, groups, vocab_size=vocab_size, device=device)
    entries = spec.embedding.entries(vocab_size)
    operator = choose_loss_operator(spec, run, groups, device=device, vocab_size=entries)
    loss = _loss(spec, run, groups.model, entries, operator=operator)
    # Initialize weights where they are allocated: generators of host and device give different numbers.
    with torch.device("cpu") if on_host else device, partitioned_as_built(run, groups):
        model = _assemble(plan, spec, run, groups, loss)
        _transform(model, run, trains=True)
    # Read by a callback, wherever in the model the loss is.
    model.z_terms = loss.z_terms
    freeze_all_but_adapters(model)
    if run.partitions_rows and groups.data.size > 1:
        partition_model(run, model, groups)
    initialize_parameters(
        model,
        run.initialization.seed,
        on_cpu=on_host,
        writable=partial(gathered_parameter, groups=groups),
    )
    _log_share(model, groups)
    return model


def build_stage(spec: ModelSpec, run: RunSpec, groups: Groups, *, vocab_size: int) -> SequentialModel:
    """Build this stage's layers for generation, with uninitialized weights. Collective over all ranks.

    The transformer layers are divided evenly; the embedding is on the first stage, the head on the last one.
    Weights and sequences are whole, whatever training divides: any length must be possible.

    Args:
        spec: the model.
        run: how it runs.
        groups: this job's process groups.
        vocab_size: the tokenizer's vocabulary size.

    Raises:
        LayoutError: sizes do not divide, or there are fewer layers than stages.
        KernelUnavailable: a requested fused operator cannot be used.
    """
    device, pipe, num_layers = computing_device(), groups.pipe, len(spec.layers)
    if num_layers < pipe.size:
        raise LayoutError(
            f"there are {pipe.size} pipeline stages, but the model has only {num_layers} layers; "
            "set a smaller pipe-parallel-size"
        )
    run = replace(run, layout=replace(run.layout, splits_sequence=False))
    groups = replace(groups, experts=SINGLE_RANK, expert_copies=None)
    plan = build_plan(spec, run, groups, vocab_size=vocab_size, device=device)
    start = 0 if pipe.rank == 0 else 1 + pipe.rank * num_layers // pipe.size
    stop = len(plan) if pipe.rank == pipe.size - 1 else 1 + (pipe.rank + 1) * num_layers // pipe.size
    with device:
        model = SequentialModel(
            plan[start:stop],
            loss_fn=_loss(spec, run, groups.model, spec.embedding.entries(vocab_size)),
            autocast=build_autocast(run.precision.autocast, device),
            owners=plan[:start],
        )
        _transform(model, run, trains=False)
    freeze_all_but_adapters(model)
    _log_share(model, groups)
    return model


def _of_logits(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of head and loss that determine the logits of a product."""
    head = spec.head
    return {"scale": head.scale, "softcap": head.softcap} if isinstance(head, Vocabulary) else {}


def _loss(
    spec: ModelSpec, run: RunSpec, group: Group, entries: int, *, operator: LossOperator | None = None
) -> LMLoss:
    return LMLoss(
        entries,
        group,
        **_of_logits(spec),
        z_loss=run.targets.z_loss,
        operator=operator,
        keeps_gradients=run.layout.splits_backward,
        dtype=None if run.precision.loss is None else DTYPES[run.precision.loss],
    )


def _assemble(plan: list[LayerPlan], spec: ModelSpec, run: RunSpec, groups: Groups, loss_fn: LMLoss) -> Any:
    """Return the layers as a plain model, as what its head asks for, or as the stages of a pipeline."""
    layout, passes = run.layout, _passes(spec, run, groups)
    recomputation = build_recomputation(run.recomputation, _splitting(run, groups), passes=passes)
    autocast = build_autocast(run.precision.autocast, computing_device())
    if layout.is_pipeline:
        return engine_module(run).build_stages(
            plan, groups, layout, loss=loss_fn, recomputation=recomputation, autocast=autocast
        )
    if type(spec.head) in HEADS:
        return _head_module(spec).assemble(
            plan, spec.head, run, groups, recomputation=recomputation, autocast=autocast
        )
    return SequentialModel(plan, loss_fn=loss_fn, recomputation=recomputation, autocast=autocast)


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
