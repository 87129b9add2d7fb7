"""Inputs of the estimates: the model and how it is run, as plain numbers, and both from a configuration.

They are cheap to create, so that `suggest.py` can try thousands of layouts.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from neox_config.derive.attention_layers import sliding_window
from neox_config.derive.compression import compresses
from neox_config.derive.elasticity import elastic_devices
from neox_config.derive.engine import chosen_engine, overlaps_reduction
from neox_config.derive.layer_compilation import (
    UNCOMPILED_STAGE,
    drops_tokens,
    why_layers_stay_uncompiled,
)
from neox_config.derive.local_steps import first_local_step
from neox_config.derive.objective import is_encoder, is_retrieval
from neox_config.derive.pipeline import chunks_per_stage
from neox_config.derive.recomputation import (
    recomputes_attention,
    recomputes_gated_product,
    recomputes_layers,
)
from neox_config.errors import ConfigError
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.attention import Sparsity
from neox_config.facts.engines import EngineName, averages_early
from neox_config.facts.optimizers import OPTIMIZER_FACTS, JoinedParts
from neox_config.facts.pipeline_schedules import SCHEDULES, ScheduleName
from neox_config.facts.tokenizers import TOKENIZER_FACTS
from neox_config.facts.vocabulary import pad_vocabulary
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.elasticity import Elasticity
from neox_config.schema.sections.tokenizer import TokenizerSection
from neox_config.spec.engine_json import accumulation_dtype
from neox_config.spec.recorded import recorded_model
from neox_config.spec.resolve import Resolved

__all__ = [
    "Layout",
    "Shape",
    "Teacher",
    "fewest_devices",
    "layout_of",
    "read_vocabulary_size",
    "shape_of",
]

# The sum of a replica's own updates, and a copy of the weights that all replicas have.
_LOCAL_VALUES = 2


@dataclass(frozen=True, slots=True)
class Teacher:
    """The model with which a student is compared in training.

    Args:
        shape: the teacher.
        compares_logits: True if the logits of both are compared, besides hidden states.
        compared_layers: number of layers whose outputs are compared.
    """

    shape: "Shape"
    compares_logits: bool
    compared_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model.

    Args:
        attention_types: attention type of each layer, as in `attention_config`.
        vocab_size: size of the vocabulary, including padding.
        keeps_scores: True if attention scores are materialized (softmax kernel, layer scaling or relative
            positions) instead of computed by flash attention.
        kv_heads: number of key and value heads; None means the number of query heads.
        rotates_in_place: True if a kernel rotates queries and keys in the memory of their projection, where
            layers are not compiled.
        has_bias: True if feed-forward projections have a bias.
        has_qkv_bias: True if the query-key-value projection has a bias; None: like the other projections of
            attention.
        has_norm_bias: True if norms have their bias.
        weight_owners: first layer with the same weights, for each layer; None if no weights are shared.
        gmlp_attention_width: size of the attention head of an amlp layer; None for no attention.
        parallel_residual: True if attention and MLP of a layer have the same input.
        drops_tokens: True if some layers process a part of the tokens in training.
        is_compressed: True if compression_training changes matrices.
        towers: number of models of this shape, each with its weights, in a retrieval model.
        embedding_size: width of the embeddings of a retrieval model, which has no head over the vocabulary;
            None: another model.
        teacher: what this model learns from, besides texts; None: nothing.
    """

    num_layers: int
    hidden_size: int
    heads: int
    seq_length: int
    vocab_size: int
    mlp_width: int
    attention_types: tuple[str, ...]
    activation: str = "gelu"
    norm: str = "layernorm"
    position: str = "learned"
    max_positions: int = 0
    rpe_buckets: int = 32
    kv_heads: int | None = None
    rotates_in_place: bool = False
    has_bias: bool = True
    has_attention_bias: bool = True
    has_qkv_bias: bool | None = None
    has_norm_bias: bool = True
    is_tied: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    keeps_scores: bool = False
    weight_owners: tuple[int, ...] | None = None
    gmlp_attention_width: int | None = None
    adapter_rank: int = 0
    adapted: tuple[str, ...] = ()
    sparsity: Sparsity = field(default_factory=Sparsity)
    parallel_residual: bool = False
    drops_tokens: bool = False
    is_compressed: bool = False
    towers: int = 1
    embedding_size: int | None = None
    teacher: Teacher | None = None

    @property
    def texts(self) -> int:
        """Return the number of texts of a sample: two in a retrieval model, a query and a block."""
        return 1 if self.embedding_size is None else 2

    @property
    def key_width(self) -> int:
        """Total size of all key heads, which is also that of all value heads."""
        return self.hidden_size // self.heads * (self.kv_heads or self.heads)

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward block has two input matrices."""
        return ACTIVATION_FACTS[self.activation].is_gated

    @property
    def owned_types(self) -> tuple[str, ...]:
        """Attention types of the layers that have their own weights."""
        return self.owned_within(range(self.num_layers))

    def owned_within(self, layers: range) -> tuple[str, ...]:
        """Return the attention types of the sets of weights that the given layers use."""
        owners = layers if self.weight_owners is None else sorted({self.weight_owners[i] for i in layers})
        return tuple(self.attention_types[owner] for owner in owners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is run.

    Args:
        model_parallel: tensor-parallel size.
        stages: number of pipeline stages; 1 without a pipeline.
        schedule: order of their passes.
        chunks: parts of the model per stage.
        micro_batch: samples per device and forward pass.
        accumulation: micro-batches per update.
        segment_layers: layers per recomputed segment; None stores all activations.
        recomputes_attention: True if attention between its projections is recomputed.
        recomputes_product: True if the product of a gated MLP is recomputed, where layers are not compiled.
        fuses_gate: True if a kernel activates the gate and multiplies, where layers are not compiled.
        splits_inputs: True if inputs of recomputed segments are partitioned across tensor-parallel ranks.
        inputs_on_host: True if inputs of recomputed segments are stored in host memory.
        splits_sequence: True for sequence parallelism of norms and dropout.
        engine: name of the engine that trains.
        has_loss_in_chunks: True if the loss is computed in chunks, without all logits at once.
        element_bytes: bytes per element of weights and activations.
        gradient_bytes: bytes per element of accumulated gradients, and of their sum for the noise scale.
        accumulated_bytes: bytes per element of accumulated gradients alone.
        reduced_bytes: bytes per element of communicated gradients.
        optimizer_states: float32 numbers per parameter stored by the optimizer.
        matrix_states: the same for the matrices of linear layers; None if there is no difference.
        has_slice_states: True if the optimizer stores a number per row and column in addition.
        joins_rows: what the optimizer joins of each weight of which several ranks have parts; None: nothing.
        has_replica_states: True if each of several data-parallel ranks stores a number per parameter, and its
            share of another, in addition.
        bucket: number of gradient elements per reduction.
        live_parameters: maximum number of parameters that ZeRO 3 keeps gathered.
        autocasts: True if matrix products use 16-bit copies of the weights (amp).
        saves_in_background: True if checkpoints are copied to host memory first (async_save).
        saves_states: True if checkpoints contain the optimizer's states.
        weighs_globally: True if the loss is averaged over the tokens of all micro-batches and replicas.
        overlaps: whether gradients of whole weights are averaged during the backward pass; None: on GPUs.
        compiles: whether layers are compiled at ZeRO stages that allow it; None: on GPUs.
    """

    model_parallel: int = 1
    stages: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    data_parallel: int = 1
    zero_stage: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    segment_layers: int | None = None
    recomputes_attention: bool = False
    recomputes_product: bool = False
    fuses_gate: bool = False
    splits_inputs: bool = False
    inputs_on_host: bool = False
    splits_sequence: bool = False
    engine: EngineName = "torch"
    has_loss_in_chunks: bool = True
    element_bytes: int = 2
    gradient_bytes: int = 2
    accumulated_bytes: int = 2
    reduced_bytes: int = 2
    optimizer_states: int = 2
    matrix_states: int | None = None
    has_slice_states: bool = False
    joins_rows: JoinedParts | None = None
    has_replica_states: bool = False
    optimizer_on_host: bool = False
    parameters_on_host: bool = False
    bucket: int = 500_000_000
    has_second_bucket: bool = False
    live_parameters: int = 1_000_000_000
    autocasts: bool = False
    saves_in_background: bool = False
    saves_states: bool = True
    weighs_globally: bool = False
    overlaps: bool | None = None
    compiles: bool | None = None

    @property
    def recomputes(self) -> bool:
        """True if layers, or attention in them, are recomputed."""
        return self.segment_layers is not None or self.recomputes_attention

    @property
    def gathers_again(self) -> bool:
        """True if the inputs of split matrices are gathered again for the backward pass."""
        is_once = self.segment_layers is not None or SCHEDULES[self.schedule].splits_backward
        return self.splits_sequence and not is_once

    @property
    def is_sharded_by_torch(self) -> bool:
        """True if `fully_shard` partitions the weights, which takes several data-parallel ranks."""
        return self.engine == "torch" and self.zero_stage > 0 and self.data_parallel > 1

    @property
    def row_ranks(self) -> int:
        """Number of ranks that divide the rows of all weights."""
        return self.data_parallel if self.is_sharded_by_torch else 1

    def compiles_on(self, device: str) -> bool:
        """Return True if layers are compiled on a type of device."""
        if self.zero_stage == UNCOMPILED_STAGE:
            return False
        return device == "cuda" if self.compiles is None else self.compiles

    def reduces_early(self, device: str) -> bool:
        """Return True if gradients of whole weights are averaged during the backward pass."""
        is_early = averages_early(
            self.engine, self.zero_stage, overlaps=self.overlaps, on_gpu=device == "cuda"
        )
        return is_early and self.stages == 1 and self.data_parallel > 1

    @property
    def reduces_every_time(self) -> bool:
        """True if `fully_shard` reduces the gradients of each micro-batch, so that only parts are stored."""
        return self.zero_stage >= 2 or self.accumulation == 1

    @property
    def devices(self) -> int:
        """Number of all devices."""
        return self.model_parallel * self.stages * self.data_parallel

    @property
    def samples(self) -> int:
        """Samples per update."""
        return self.micro_batch * self.accumulation * self.data_parallel


def fewest_devices(config: NeoXConfig) -> int:
    """Return the devices of one copy, or of the copies implied if all three batch sizes are given."""
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
        # `resolve` reports the error.
        return copy


def shape_of(resolved: Resolved, *, vocab_size: int) -> Shape:
    """Return the model of a configuration, and its teacher, which is read from the checkpoint if it is there.

    A teacher that is not there is taken to be like the student, with the layers that the student copies.

    Args:
        resolved: the configuration.
        vocab_size: number of entries of the tokenizer, without padding.
    """
    own = _shape_alone(resolved, vocab_size)
    section = resolved.config.compression.compression_training.layer_reduction
    if not (section.enabled and section.distill.enabled):
        return own
    taken = section.teacher_layer or ()
    found = recorded_model(Path(section.teacher)) if section.teacher is not None else None
    if found is not None:
        theirs = replace(_shape_alone(found, vocab_size), seq_length=own.seq_length)
    else:
        layers = max(own.num_layers, *(layer + 1 for layer in taken)) if taken else own.num_layers
        kind = own.attention_types[-1]
        types = own.attention_types + (kind,) * (layers - own.num_layers)
        theirs = replace(own, num_layers=layers, attention_types=types, weight_owners=None)
    compared = len(taken) if section.distill.hidden_states_weight else 0
    return replace(own, teacher=Teacher(theirs, section.distill.logits_share > 0, compared))


def _shape_alone(resolved: Resolved, vocab_size: int) -> Shape:
    model, attention = resolved.config.model, resolved.config.attention
    return Shape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        seq_length=model.seq_length,
        vocab_size=pad_vocabulary(vocab_size, model.make_vocab_size_divisible_by),
        mlp_width=resolved.derived.mlp_width,
        attention_types=resolved.derived.attention_types,
        kv_heads=model.num_kv_heads,
        rotates_in_place=_rotates_in_place(resolved.config),
        has_bias=model.use_bias_in_mlp,
        has_attention_bias=model.use_bias_in_attn_linear,
        has_qkv_bias=model.use_bias_in_qkv,
        has_norm_bias=model.use_bias_in_norms,
        activation=model.activation,
        norm=model.norm,
        position=attention.pos_emb,
        max_positions=model.max_position_embeddings,
        rpe_buckets=attention.rpe_num_buckets,
        is_tied=not model.no_weight_tying and not is_retrieval(resolved.config),
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        keeps_scores=attention.scaled_upper_triang_masked_softmax_fusion is True
        or attention.scaled_masked_softmax_fusion is True
        or attention.apply_query_key_layer_scaling
        or model.onnx_safe
        or attention.pos_emb == "rpe",
        weight_owners=resolved.derived.weight_owners,
        gmlp_attention_width=model.gmlp_attn_dim,
        adapter_rank=resolved.config.adapters.lora_rank,
        adapted=resolved.config.adapters.lora_target_modules,
        sparsity=_sparsity_of(resolved.config),
        parallel_residual=model.gpt_j_residual,
        drops_tokens=drops_tokens(resolved.config),
        is_compressed=compresses(resolved.config),
        towers=2 if is_retrieval(resolved.config) and not resolved.config.objective.ict_shared_towers else 1,
        embedding_size=resolved.config.objective.ict_head_size if is_retrieval(resolved.config) else None,
    )


def _rotates_in_place(config: NeoXConfig) -> bool:
    """Return True if a kernel certainly does; with rope_fusion: auto a trial decides."""
    model = config.model
    shares_keys = model.num_kv_heads not in (None, model.num_attention_heads)
    return config.attention.rope_fusion is True and not shares_keys and not config.engine.eigenvalue.enabled


def _sparsity_of(config: NeoXConfig) -> Sparsity:
    given = config.attention.sparsity_config
    return Sparsity(
        window=sliding_window(config),
        is_causal=not is_encoder(config),
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
    """Return how a configuration runs its model."""
    config, derived = resolved.config, resolved.derived
    zero, recompute = config.zero.zero_optimization, config.activation_checkpointing
    kind, given = config.optimizer.optimizer.kind, config.optimizer.optimizer.params.given()
    facts = OPTIMIZER_FACTS[kind]
    size = 4 if derived.precision == "fp32" else 2
    has_local_steps = first_local_step(config) is not None
    logged = config.logging
    sums_gradients = logged.log_gradient_noise_scale and not logged.gradient_noise_scale_cpu_offload
    return Layout(
        model_parallel=derived.model_parallel_size,
        stages=derived.pipe_parallel_size,
        schedule=config.parallelism.pipeline_schedule,
        chunks=chunks_per_stage(config),
        data_parallel=derived.data_parallel_size,
        zero_stage=zero.stage,
        micro_batch=derived.micro_batch_size,
        accumulation=derived.accumulation,
        segment_layers=recompute.checkpoint_num_layers if recomputes_layers(config) else None,
        recomputes_attention=recomputes_attention(config),
        # With glu_fusion: auto a trial decides, and more memory is the safe estimate.
        recomputes_product=recomputes_gated_product(config, is_fused=config.model.glu_fusion is True),
        fuses_gate=config.model.glu_fusion is True,
        splits_inputs=recompute.partition_activations,
        inputs_on_host=recompute.checkpoint_in_cpu,
        splits_sequence=config.parallelism.sequence_parallel,
        engine=chosen_engine(config).name,
        # The chunked loss computes gradients before loss scaling, so small ones would underflow in float16.
        has_loss_in_chunks=derived.computes_in != "fp16",
        element_bytes=size,
        gradient_bytes=_bytes_of(accumulation_dtype(resolved), size) + (4 if sums_gradients else 0),
        accumulated_bytes=_bytes_of(accumulation_dtype(resolved), size),
        reduced_bytes=_bytes_of(config.engine.communication_data_type or _summed_in(resolved), size),
        optimizer_states=facts.values_per_element(given) + (_LOCAL_VALUES if has_local_steps else 0),
        matrix_states=len(facts.matrix_states) or None,
        has_slice_states=bool(facts.other_shapes),
        joins_rows=facts.joins_rows,
        has_replica_states=bool(facts.replica_states),
        optimizer_on_host=zero.offload_optimizer.device != "none" or kind.startswith("cpu_"),
        parameters_on_host=zero.offload_param.device != "none",
        bucket=zero.reduce_bucket_size,
        has_second_bucket=zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm,
        live_parameters=zero.stage3_max_live_parameters,
        autocasts=resolved.derived.autocast is not None,
        saves_in_background=config.checkpoint.save is not None and config.checkpoint.async_save,
        saves_states=not config.checkpoint.no_save_optim,
        weighs_globally=config.training.loss_normalization == "global",
        overlaps=overlaps_reduction(config),
        compiles=_compiles(config),
    )


def _compiles(config: NeoXConfig) -> bool | None:
    """Return whether layers are compiled at ZeRO stages that allow it; None: on GPUs.

    On GPUs, `auto` compiles the layers of all but short trainings, unless each needs a separate graph.
    """
    if why_layers_stay_uncompiled(config, zero_stage=0) is not None:
        return False
    requested = config.model.compile
    if requested == "auto":
        return False if config.attention.apply_query_key_layer_scaling else None
    return requested


def _summed_in(resolved: Resolved) -> str | None:
    """Return the data type in which stage 0 reduces gradients by default: that of accumulation."""
    return accumulation_dtype(resolved) if resolved.config.zero.zero_optimization.stage == 0 else None


def _bytes_of(dtype: str | None, otherwise: int) -> int:
    return {None: otherwise, "fp32": 4}.get(dtype, 2)


def read_vocabulary_size(tokenizer: TokenizerSection) -> int | None:
    """Return the number of entries of the configured tokenizer, or None if it is not known.

    Raises:
        ConfigError: The file exists, but is not a valid vocabulary.
    """
    try:
        return TOKENIZER_FACTS[tokenizer.tokenizer_type].read_entries(tokenizer.vocab_file)
    except (OSError, ValueError) as error:
        what = f"is not the vocabulary of a {tokenizer.tokenizer_type} ({error})"
        raise ConfigError(
            f"vocab-file: {tokenizer.vocab_file!r} {what}; set the right file, or give --vocab-size",
            [Problem("vocab_file", what, "set the right file", value=tokenizer.vocab_file)],
        ) from error
