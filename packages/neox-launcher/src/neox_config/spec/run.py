"""How the model runs: layout, engine, precision, recomputation and operators, as plain frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from neox_config.extras.compression.fields import CompressionTraining
from neox_config.facts.engines import Capability, EngineName, averages_early
from neox_config.facts.pipeline_schedules import SCHEDULES, Placement, ScheduleName
from neox_config.schema.sections.experts import ExpertsSection
from neox_config.schema.sections.objective import ObjectiveSection
from neox_config.spec.values import of

__all__ = [
    "AnyDataType",
    "Batch",
    "Compilation",
    "DataType",
    "Dropout",
    "Engine",
    "Fusion",
    "Fusions",
    "Gradients",
    "Initialization",
    "Layout",
    "Multipliers",
    "Precision",
    "Recomputation",
    "RunSpec",
]

Fusion = bool | Literal["auto"]
DataType = Literal["fp32", "bf16", "fp16"]
AnyDataType = DataType | Literal["fp64"]
"""A configuration does not choose fp64: only `neox-launch verify-layout` does (`Resolved.in_float64`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the devices divide the model and the batch.

    Args:
        world: number of devices (workers) of the whole job.
        hosts: number of hosts.
        data: data-parallel size, the number of copies of the model.
        tensor: tensor-parallel size.
        stages: number of pipeline stages, at least 1.
        experts: data-parallel devices that divide the experts; 1: each has all.
        splits_sequence: tensor-parallel ranks divide the sequence outside matrix products.
        schedule: order of the passes of a pipeline; 1f1b also where there is none.
        chunks: parts of the model on each stage.
        partition: how layers are divided among stages.
        is_pipeline: the model runs as pipeline stages: of several, or of the only one of DeepSpeed's.
        zero: ZeRO stage.
        second_partition: adjacent ranks that divide the weights a second time (ZeRO 3); 1: none.
        offloads_optimizer: the states of the optimizer are kept in host memory or on NVMe.
        elastic: numbers of devices that the batch size works with; empty without elasticity.
        backend: backend of torch.distributed; None: nccl with GPUs, else gloo.
    """

    world: int
    hosts: int
    data: int
    tensor: int = of("model_parallel_size")
    stages: int = of("pipe_parallel_size")
    experts: int = of("expert_parallel_size", default=1)
    splits_sequence: bool = of("sequence_parallel")
    schedule: ScheduleName = of("pipeline_schedule")
    chunks: int = of("virtual_pipeline_stages")
    partition: str = of("pipe_partition_method")
    is_pipeline: bool = of("pipe_parallel_size", "engine")
    zero: int = of("zero_optimization.stage")
    second_partition: int = of("zero_optimization.zero_hpz_partition_size")
    offloads_optimizer: bool = of("zero_optimization.offload_optimizer.device")
    elastic: tuple[int, ...] = of("elasticity.enabled")
    backend: str | None = of("distributed_backend")

    @property
    def splits_backward(self) -> bool:
        """True if the gradients of weights are computed apart from those of activations."""
        return self.is_pipeline and SCHEDULES[self.schedule].splits_backward

    @property
    def placement(self) -> Placement:
        """How chunks are placed on stages."""
        return SCHEDULES[self.schedule].placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine that trains.

    Args:
        name: a key of `ENGINES`.
        reason: why, as a clause that follows "because".
        offers: what it offers with this ZeRO stage and layout.
        settings: DeepSpeed's configuration, as JSON.
    """

    name: EngineName = of("engine", "deepspeed")
    reason: str
    offers: frozenset[Capability]
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Data types.

    Args:
        weights: data type of weights, and of activations without autocast.
        autocast: data type of matrix products under autocast (amp); None without it.
        loss: data type of the logits in the loss, if it is not that of the model's output.
    """

    weights: AnyDataType = of("precision")
    autocast: Literal["fp16", "bf16"] | None = of("amp.dtype")
    loss: Literal["fp16"] | None = of("fp16_lm_cross_entropy")

    @property
    def computes_in(self) -> AnyDataType:
        """The data type whose rounding the results of layers have."""
        return self.autocast or self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step computes.

    Args:
        length: tokens of a sample.
        micro: samples per device and forward pass.
        accumulation: micro-batches per update.
        whole: samples per update over all devices.
        resets_attention: tokens see only tokens of their own document.
        resets_positions: positions count from the start of each document.
        has_padding: tokens would see padding, which is hidden from them.
    """

    length: int = of("seq_length")
    micro: int = of("train_micro_batch_size_per_gpu")
    accumulation: int = of("gradient_accumulation_steps")
    whole: int = of("train_batch_size")
    resets_attention: bool = of("reset_attention_mask")
    resets_positions: bool = of("reset_position_ids", "pos_emb")
    has_padding: bool = of("pack_impl", "short_seq_prob", "objective")

    @property
    def separates_tokens(self) -> bool:
        """True if layers receive document ids, which separate documents, or tokens from padding."""
        return self.resets_attention or self.has_padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What the backward pass computes again instead of keeping it.

    Args:
        segment: layers per segment that is recomputed from its input; None: layers are not recomputed.
        attention: attention is recomputed from queries, keys and values.
        product: the product of up and gate is: always, never, or where a fused kernel computes it.
        gathers_inputs: sequence parallelism gathers the inputs of split matrices again.
        partitions_inputs: tensor-parallel ranks divide the inputs of segments.
        inputs_on_host: inputs of segments are kept in host memory.
        slots: inputs that one buffer holds; 0: as many as there are; None: no buffer.
        synchronizes: wait for the device around both passes of each segment.
        profiles: log the time of both passes of each segment.
    """

    segment: int | None = of("checkpoint_activations", "checkpoint_num_layers")
    attention: bool = of("checkpoint_granularity")
    product: bool | Literal["fused"] = of("recompute_gated_product")
    gathers_inputs: bool = of("sequence_parallel")
    partitions_inputs: bool = of("partition_activations")
    inputs_on_host: bool = of("checkpoint_in_cpu")
    slots: int | None = of("contiguous_checkpointing", "number_checkpoints")
    synchronizes: bool = of("synchronize_each_layer")
    profiles: bool = of("profile_backward")

    def recomputes_product(self, *, is_fused: bool) -> bool:
        """Return True if the product of up and gate is computed again."""
        return is_fused if self.product == "fused" else self.product


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """Which operators are requested in place of PyTorch's: true requires one, auto allows it.

    Args:
        apex_norm: PyTorch's layer norm in the form of NVIDIA apex's.
        scales_by_layer: scores are divided by the number of the layer, and multiplied in the softmax.
        is_for_export: only what PyTorch's exporter to ONNX supports.
        has_second_derivatives: nothing that writes gradients in place.
    """

    rope: Fusion = of("rope_fusion")
    bias_gelu: Fusion = of("bias_gelu_fusion")
    glu: Fusion = of("glu_fusion")
    bias_dropout: Fusion = of("bias_dropout_fusion")
    layernorm: Fusion = of("layernorm_fusion")
    rmsnorm: Fusion = of("rmsnorm_fusion")
    loss: Fusion = of("loss_fusion")
    causal_softmax: Fusion = of("scaled_upper_triang_masked_softmax_fusion")
    masked_softmax: Fusion = of("scaled_masked_softmax_fusion")
    apex_norm: bool = of("norm")
    scales_by_layer: bool = of("apply_query_key_layer_scaling")
    is_for_export: bool = of("onnx_safe")
    has_second_derivatives: bool = of("eigenvalue.enabled")

    @property
    def stores_scores(self) -> bool:
        """True if attention stores its scores, for a requested kernel, to scale them, or for an export."""
        is_asked = True in (self.causal_softmax, self.masked_softmax)
        return is_asked or self.scales_by_layer or self.is_for_export


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """Whether layers are compiled with torch.compile.

    Args:
        requested: true requires it; auto: if it works and is faster.
        why_not: the setting that rules it out, with the reason; None: nothing does.
        why_never: the same, whatever the ZeRO stage.
    """

    requested: Fusion = of("compile")
    why_not: str | None
    why_never: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """How gradients are accumulated and reduced.

    Args:
        accumulate_in: data type in which micro-batches are summed.
        reduce_in: data type of messages; None: that of the gradients.
        divides_first: gradients are divided before they are summed.
        predivide_factor: the part of the division that comes first.
        reduce_scatter: False allows another division than before the sum at stages 1 and 2.
        overlaps: gradients are reduced during the backward pass; None: on GPUs.
        reduces_each: parts of the gradients of each micro-batch are reduced (stages 2 and 3).
    """

    accumulate_in: AnyDataType = of("data_types.grad_accum_dtype")
    reduce_in: DataType | None = of("communication_data_type")
    divides_first: bool = of("prescale_gradients")
    predivide_factor: float = of("gradient_predivide_factor")
    reduce_scatter: bool = of("zero_optimization.reduce_scatter")
    overlaps: bool | None = of("zero_optimization.overlap_comm")
    reduces_each: bool = of("zero_optimization.stage", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialization:
    """Where weights start.

    Args:
        method: name of the method of embeddings and input projections.
        output_method: name of the method of projections that write to the residual stream.
        std: standard deviation of methods that have one.
        width: channels between layers that methods are computed for.
        depth: number of layers that they are computed for.
        seed: the random seed.
        on_host: weights are made in host memory.
    """

    method: str = of("init_method")
    output_method: str = of("output_layer_init_method")
    std: float = of("init_method_std")
    width: int = of("hidden_size", "mup_base.hidden_size")
    depth: int = of("num_layers", "mup_base.num_layers")
    seed: int = of("seed")
    on_host: bool = of("use_cpu_initialization", "lazy_mpu_init")


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """What multiplies the settings of a kind of weight (muP).

    Args:
        rows: how many times as many rows a matrix has as that of the base model, which init methods are
            computed for; of a table or vector 1.
        columns: how many times as many columns.
        std: of the initial values.
        rate: of the learning rate.
        decay: of the weight decay.
        epsilon: of the epsilon of Adam.
        reason: why.
    """

    rows: float = 1.0
    columns: float = 1.0
    std: float = 1.0
    rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0
    reason: str = "is as in the base model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Probabilities of dropout in training.

    Args:
        hidden: of embeddings and of what layers add.
        attention: of attention weights.
        adapters: of the input of adapters.
        token_layers: layers that process a part of the tokens (random-LTD).
    """

    hidden: float = of("hidden_dropout")
    attention: float = of("attention_dropout")
    adapters: float = of("lora_dropout")
    token_layers: frozenset[int] = of("data_efficiency.data_routing.random_ltd.random_ltd_layer_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """How the model runs.

    Args:
        layout: how devices divide the model and the batch.
        engine: the engine that trains.
        precision: data types.
        batch: what a step computes.
        recomputation: what the backward pass computes again.
        fusions: requested operators.
        compilation: whether layers are compiled.
        gradients: how gradients are accumulated and reduced.
        initialization: where weights start.
        multipliers: what multiplies the settings of each kind of weight; empty without muP.
        dropout: what is dropped in training.
        compression: how matrices are quantized and pruned; all parts may be disabled.
        compressible: logical names of the matrices that this can change; none if all parts are disabled.
        targets: settings of what is predicted, and of the terms of the loss, as they were given.
        experts: settings of experts; those that determine no logits are read here.
    """

    layout: Layout
    engine: Engine
    precision: Precision
    batch: Batch
    recomputation: Recomputation
    fusions: Fusions
    compilation: Compilation
    gradients: Gradients
    initialization: Initialization
    dropout: Dropout
    compression: CompressionTraining = of("compression_training")
    compressible: tuple[str, ...] = of("compression_training")
    targets: ObjectiveSection = of("objective")
    experts: ExpertsSection = of("moe_router_type")
    multipliers: Mapping[str, Multipliers] = of("use_mup", default_factory=dict, hash=False)

    @property
    def partitions_rows(self) -> bool:
        """True if data-parallel ranks, where there are several, divide the rows of all weights."""
        return self.engine.name == "torch" and self.layout.zero > 0

    @property
    def reduces_in(self) -> AnyDataType:
        """The data type in which the torch engine sums gradients over ranks under ZeRO."""
        return self.gradients.reduce_in or self.precision.weights

    def reduces_early(self, *, on_gpu: bool) -> bool:
        """Return True if gradients are averaged during the backward pass (see `averages_early`)."""
        overlaps = False if self.layout.is_pipeline else self.gradients.overlaps
        return averages_early(self.engine.name, self.layout.zero, overlaps=overlaps, on_gpu=on_gpu)
