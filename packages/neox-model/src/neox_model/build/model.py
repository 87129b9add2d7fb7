"""The model, written once: an ordered list of layers, made from configuration.

    embedding, layers.0 .. layers.N-1, final_norm, lm_head

The list is turned into a plain module or a pipeline, whose parameters are then filled by logical name: the
same configuration and seed give the same model on every layout.
"""

import logging
import math
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from neox_launcher.config import NeoXConfig, Resolved, engine_json
from neox_model.build.activation_checkpointing import build_recomputation
from neox_model.build.as_pipeline import PipelineModel, as_pipeline
from neox_model.build.as_sequential import SequentialModel, as_sequential
from neox_model.build.attention import build_input_position, log_attention_paths
from neox_model.build.choices import DTYPES
from neox_model.build.operators import choose_operators
from neox_model.build.plan import LayerPlan
from neox_model.build.transformer import build_layer, build_norm, init_method
from neox_model.build.zero_sharding import shared_construction, whole_parameter
from neox_model.initialization import initialize_parameters
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead, LMLoss
from neox_model.parallel.groups import Group, Groups
from neox_model.parallel.logical import named_logical_parameters

__all__ = ["LayerPlan", "build_model", "build_plan", "padded_vocab_size"]

logger = logging.getLogger(__name__)


def padded_vocab_size(config: NeoXConfig, vocab_size: int) -> int:
    """Entries of the logical vocabulary: the tokenizer's, padded alike for every layout."""
    multiple = config.model.make_vocab_size_divisible_by
    return -(-vocab_size // multiple) * multiple


def build_plan(
    resolved: Resolved, groups: Groups, *, vocab_size: int, device: torch.device | str = "cpu"
) -> list[LayerPlan]:
    """The model as a list of layers; builds none. Collective over all ranks.

    Args:
        resolved: the configuration.
        groups: this job's.
        vocab_size: the tokenizer's entries.
        device: where the layers will be.

    Raises:
        LayoutError: sizes that do not divide.
        ModelError: something configured has no implementation.
        KernelUnavailable: a fused operator was asked for and cannot be used.
    """
    config = resolved.config
    init = init_method(config)
    splits_sequence = config.parallelism.sequence_parallel and groups.model.size > 1
    group = replace(groups.model, splits_sequence=splits_sequence)
    vocabulary = {
        "vocab_size": padded_vocab_size(config, vocab_size),
        "hidden_size": config.model.hidden_size,
        "init": init,
        "group": group,
    }
    owner = None if config.model.no_weight_tying else "embedding"
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
    layers, owners = [], resolved.derived.weight_owners
    for index in range(config.model.num_layers):
        cls, kwargs = build_layer(resolved, index, group=group, operators=operators)
        shares = None if owners is None else f"layers.{owners[index]}"
        layers.append(LayerPlan(name=f"layers.{index}", cls=cls, kwargs=kwargs, shares=shares))
    norm = LayerPlan(name="final_norm", cls=norm_class, kwargs=norm_kwargs)
    head = LayerPlan(name="lm_head", cls=LMHead, kwargs=vocabulary, tied=owner, tied_weight="weight")
    return [embedding, *layers, norm, head]


def build_model(resolved: Resolved, groups: Groups, *, vocab_size: int) -> SequentialModel | PipelineModel:
    """This rank's part of the model, its parameters filled; collective over all ranks.

    The plain model takes `tokens_BS` (or a tuple, see Embedding) to `logits_BSV` of this rank's part of the
    vocabulary; with `(labels_BS, loss_mask_BS)` too, to the loss, without making all logits. A pipeline's
    last stage gives hidden states, and its `loss_fn` takes these to the loss.

    Args:
        resolved: the configuration.
        groups: this job's.
        vocab_size: the tokenizer's entries.

    Raises:
        LayoutError: sizes that do not divide.
        ModelError: something configured has no implementation.
        KernelUnavailable: a fused operator was asked for and cannot be used.
    """
    config = resolved.config
    device = _device()
    # Weights begin where they are made: on the host or on the device, whose generators give different
    # numbers.
    on_host = config.model.use_cpu_initialization or config.parallelism.lazy_mpu_init
    plan = build_plan(resolved, groups, vocab_size=vocab_size, device=device)
    with torch.device("cpu") if on_host else device:
        model = _assemble(plan, resolved, groups, _loss(config, groups.model, vocab_size))
    initialize_parameters(
        model,
        config.training.seed,
        on_cpu=on_host,
        writable=partial(whole_parameter, groups=groups),
    )
    _log_share(model, groups)
    return model


def _loss(config: NeoXConfig, group: Group, vocab_size: int) -> LMLoss:
    return LMLoss(
        padded_vocab_size(config, vocab_size),
        group,
        is_mean=config.training.loss_normalization == "micro_batch",
        dtype=torch.float16 if config.precision.fp16_lm_cross_entropy else None,
    )


def _assemble(
    plan: list[LayerPlan], resolved: Resolved, groups: Groups, loss_fn: LMLoss
) -> SequentialModel | PipelineModel:
    config = resolved.config
    recomputation = build_recomputation(resolved, groups)
    if resolved.derived.uses_pipeline:
        return as_pipeline(
            plan,
            groups,
            loss=loss_fn,
            partition_method=config.parallelism.pipe_partition_method,
            recomputation=recomputation,
        )
    with shared_construction(config.zero.zero_optimization.stage, groups, engine_json(resolved)):
        return as_sequential(plan, loss_fn=loss_fn, recomputation=recomputation)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _log_share(model: nn.Module, groups: Groups) -> None:
    """How much of the model this rank holds, where that is not all of it."""
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
