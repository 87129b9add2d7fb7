"""What costs are reckoned from: the model and how it is run, as plain numbers, and both from a configuration.

Made by hand they cost nothing, so that `suggest.py` can try thousands of layouts.
"""

import json
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from neox_launcher.config.elasticity import elastic_devices
from neox_launcher.config.engine_json import accumulation_dtype
from neox_launcher.config.optimizers import OPTIMIZER_FACTS
from neox_launcher.config.resolve import Resolved
from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.attention import SparsityConfig
from neox_launcher.config.sections.elasticity import Elasticity
from neox_launcher.config.sections.model import GATED_ACTIVATIONS
from neox_launcher.config.sections.tokenizer import TokenizerSection
from neox_launcher.errors import ConfigError

__all__ = [
    "USUAL_VOCABULARY",
    "Layout",
    "Shape",
    "Sparsity",
    "fewest_devices",
    "layout_of",
    "pad_vocabulary",
    "read_vocabulary_size",
    "shape_of",
]

# Entries of the tokenizers that need no file, and of the files that nearly everybody uses with the others.
USUAL_VOCABULARY = {
    "GPT2BPETokenizer": 50_257,
    "HFTokenizer": 50_277,
    "HFGPT2Tokenizer": 50_258,
    "CharLevelTokenizer": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """Keys that a query of a sparse layer looks at, counted in blocks."""

    block: int = 16
    local_blocks: int = 4
    local_attention_blocks: int = 4
    global_blocks: int = 1
    random_blocks: int = 0
    sliding_blocks: int = 3
    variable_window: float = 4.0
    listed_global_blocks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model.

    Args:
        attention_types: one per layer, as in `attention_config`.
        vocab_size: entries of the logical vocabulary, padding included.
        keeps_scores: attention scores are tensors of their own (a softmax kernel, layer scaling or relative
            positions), not inside flash attention.
        kv_heads: heads of keys and values; None for as many as of queries.
        has_bias: of the feed-forward part.
        weight_owners: of each layer, the first one that has the same weights; None where none are shared.
        gmlp_attention_width: of an amlp layer's attention; None for none.
    """

    num_layers: int
    hidden_size: int
    heads: int
    seq_length: int
    vocab_size: int
    intermediate_size: int
    attention_types: tuple[str, ...]
    activation: str = "gelu"
    norm: str = "layernorm"
    position: str = "learned"
    max_positions: int = 0
    rpe_buckets: int = 32
    kv_heads: int | None = None
    has_bias: bool = True
    has_attention_bias: bool = True
    is_tied: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    keeps_scores: bool = False
    weight_owners: tuple[int, ...] | None = None
    gmlp_attention_width: int | None = None
    sparsity: Sparsity = field(default_factory=Sparsity)

    @property
    def key_width(self) -> int:
        """Channels of all keys, and of all values."""
        return self.hidden_size // self.heads * (self.kv_heads or self.heads)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward part has two input matrices."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def owned_types(self) -> tuple[str, ...]:
        """Attention types of the layers that bring weights of their own."""
        return self.owned_within(range(self.num_layers))

    def owned_within(self, layers: range) -> tuple[str, ...]:
        """Attention types of the sets of weights that some of the layers use."""
        owners = layers if self.weight_owners is None else sorted({self.weight_owners[i] for i in layers})
        return tuple(self.attention_types[owner] for owner in owners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is run.

    Args:
        model_parallel: tensor-parallel size.
        stages: pipeline stages; 1 without a pipeline.
        micro_batch: samples of a device at once.
        accumulation: micro-batches of an update.
        segment_layers: layers per recomputed segment; None keeps all activations.
        splits_inputs: recomputed segments keep their share of the input on each tensor-parallel rank.
        inputs_on_host: recomputed segments keep their inputs in host memory.
        splits_sequence: norms and dropout work on a part of the sequence on each tensor-parallel rank.
        has_loss_in_chunks: not all logits exist at a time.
        element_bytes: of weights and activations.
        gradient_bytes: of a gradient while it is summed.
        reduced_bytes: of a gradient while it is sent.
        optimizer_states: float32 numbers that the optimizer keeps per parameter.
        bucket: gradients reduced at a time.
        live_parameters: parameters that ZeRO 3 keeps gathered at most.
    """

    model_parallel: int = 1
    stages: int = 1
    data_parallel: int = 1
    zero_stage: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    segment_layers: int | None = None
    splits_inputs: bool = False
    inputs_on_host: bool = False
    splits_sequence: bool = False
    has_loss_in_chunks: bool = True
    element_bytes: int = 2
    gradient_bytes: int = 2
    reduced_bytes: int = 2
    optimizer_states: int = 2
    optimizer_on_host: bool = False
    parameters_on_host: bool = False
    bucket: int = 500_000_000
    has_second_bucket: bool = False
    live_parameters: int = 1_000_000_000

    @property
    def devices(self) -> int:
        """All of them."""
        return self.model_parallel * self.stages * self.data_parallel

    @property
    def samples(self) -> int:
        """Of one update."""
        return self.micro_batch * self.accumulation * self.data_parallel


def pad_vocabulary(entries: int, multiple: int) -> int:
    """The logical vocabulary: the tokenizer's entries, rounded up; the same for every layout."""
    return ceil(entries / multiple) * multiple


def fewest_devices(config: NeoXConfig) -> int:
    """Devices of one copy of the model; of as many as the three batch sizes ask for, where all are given."""
    parallel, training = config.parallelism, config.training
    copy = max(1, parallel.model_parallel_size) * max(1, parallel.pipe_parallel_size)
    if config.elasticity.elasticity.enabled:
        return _fewest_elastic(config.elasticity.elasticity, copy)
    per_copy = (training.train_micro_batch_size_per_gpu or 0) * (training.gradient_accumulation_steps or 0)
    if training.train_batch_size and per_copy and training.train_batch_size % per_copy == 0:
        return copy * (training.train_batch_size // per_copy)
    return copy


def _fewest_elastic(block: Elasticity, copy: int) -> int:
    try:
        return min(elastic_devices(block, devices_per_copy=copy))
    except ValueError:
        # `resolve` says what is wrong.
        return copy


def shape_of(resolved: Resolved, *, vocab_size: int) -> Shape:
    """The model of a configuration.

    Args:
        resolved: the configuration.
        vocab_size: entries of the tokenizer, without padding.
    """
    model, attention = resolved.config.model, resolved.config.attention
    return Shape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        seq_length=model.seq_length,
        vocab_size=pad_vocabulary(vocab_size, model.make_vocab_size_divisible_by),
        intermediate_size=resolved.derived.intermediate_size,
        attention_types=resolved.derived.attention_types,
        kv_heads=model.num_kv_heads,
        has_bias=model.use_bias_in_mlp,
        has_attention_bias=model.use_bias_in_attn_linear,
        activation=model.activation,
        norm=model.norm,
        position=attention.pos_emb,
        max_positions=model.max_position_embeddings,
        rpe_buckets=attention.rpe_num_buckets,
        is_tied=not model.no_weight_tying,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        keeps_scores=attention.scaled_upper_triang_masked_softmax_fusion is True
        or attention.scaled_masked_softmax_fusion is True
        or attention.apply_query_key_layer_scaling
        or model.onnx_safe
        or attention.pos_emb == "rpe",
        weight_owners=resolved.derived.weight_owners,
        gmlp_attention_width=model.gmlp_attn_dim,
        sparsity=_sparsity_of(attention.sparsity_config),
    )


def _sparsity_of(given: SparsityConfig) -> Sparsity:
    return Sparsity(
        block=given.block,
        local_blocks=given.num_local_blocks,
        local_attention_blocks=given.local_attention_blocks,
        global_blocks=given.num_global_blocks,
        random_blocks=given.num_random_blocks,
        sliding_blocks=given.num_sliding_window_blocks,
        variable_window=sum(given.local_window_blocks) / len(given.local_window_blocks),
        listed_global_blocks=sum(stop - start for start, stop in given.global_ranges),
    )


def layout_of(resolved: Resolved) -> Layout:
    """How a configuration runs its model."""
    config, derived = resolved.config, resolved.derived
    zero, recompute = config.zero.zero_optimization, config.activation_checkpointing
    kind, given = config.optimizer.optimizer.kind, config.optimizer.optimizer.params.given()
    size = 4 if derived.precision == "fp32" else 2
    return Layout(
        model_parallel=derived.model_parallel_size,
        stages=derived.pipe_parallel_size,
        data_parallel=derived.data_parallel_size,
        zero_stage=zero.stage,
        micro_batch=derived.micro_batch_size,
        accumulation=derived.accumulation,
        segment_layers=recompute.checkpoint_num_layers if recompute.checkpoint_activations else None,
        splits_inputs=recompute.partition_activations,
        inputs_on_host=recompute.checkpoint_in_cpu,
        splits_sequence=config.parallelism.sequence_parallel,
        # Its gradients are made before the loss is scaled, and small ones of float16 would be lost.
        has_loss_in_chunks=derived.precision != "fp16",
        element_bytes=size,
        gradient_bytes=_bytes_of(accumulation_dtype(resolved), size),
        reduced_bytes=_bytes_of(config.engine.communication_data_type or _summed_in(resolved), size),
        optimizer_states=OPTIMIZER_FACTS[kind].values_per_element(given),
        optimizer_on_host=zero.offload_optimizer.device != "none" or kind.startswith("cpu_"),
        parameters_on_host=zero.offload_param.device != "none",
        bucket=zero.reduce_bucket_size,
        has_second_bucket=zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm,
        live_parameters=zero.stage3_max_live_parameters,
    )


def _summed_in(resolved: Resolved) -> str | None:
    """What stage 0 reduces gradients in unless configured: the format that they are summed in."""
    return accumulation_dtype(resolved) if resolved.config.zero.zero_optimization.stage == 0 else None


def _bytes_of(dtype: str | None, otherwise: int) -> int:
    return {None: otherwise, "fp32": 4}.get(dtype, 2)


def read_vocabulary_size(tokenizer: TokenizerSection) -> int | None:
    """Entries of the configured tokenizer; None when its file is not here or is another tokenizer's name.

    Raises:
        ConfigError: the file is here and is no vocabulary.
    """
    if tokenizer.tokenizer_type == "CharLevelTokenizer":
        return USUAL_VOCABULARY["CharLevelTokenizer"]
    if tokenizer.vocab_file is None or not Path(tokenizer.vocab_file).is_file():
        return None
    try:
        content = json.loads(Path(tokenizer.vocab_file).read_bytes())
        if tokenizer.tokenizer_type == "GPT2BPETokenizer":
            return len(content)
        added = {entry["content"] for entry in content.get("added_tokens", [])}
        entries = content["model"]["vocab"]
        return len(added | {entry if isinstance(entry, str) else entry[0] for entry in entries})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"vocab-file: {tokenizer.vocab_file!r} is not the vocabulary of a {tokenizer.tokenizer_type} "
            f"({type(error).__name__}: {error}); name the right file, or give --vocab-size"
        ) from error
