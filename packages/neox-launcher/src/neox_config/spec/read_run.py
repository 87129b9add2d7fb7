"""The specifications of the run, its updates and its data from the parameters."""

from dataclasses import dataclass

from neox_config.derive.engine import chosen_engine, engine_offers, uses_pipeline
from neox_config.derive.experts import expert_ranks
from neox_config.derive.layer_compilation import drops_tokens, why_layers_stay_uncompiled
from neox_config.derive.learning_rate import decay_iterations, learning_rate_curve
from neox_config.derive.objective import has_padding, tokens_behind_input
from neox_config.derive.pipeline import chunks_per_stage
from neox_config.derive.recomputation import (
    gathers_inputs_again,
    recomputes_attention,
    recomputes_gated_product,
    recomputes_layers,
)
from neox_config.extras.compression.matrices import compresses, compressible_matrices
from neox_config.facts.engines import ENGINES
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.precision import Amp, Fp16
from neox_config.spec.engine_json import deepspeed_settings
from neox_config.spec.model import ModelSpec
from neox_config.spec.mup import initial_sizes, read_multipliers
from neox_config.spec.run import (
    AnyDataType,
    Batch,
    Compilation,
    DataType,
    Dropout,
    Engine,
    Fusions,
    Gradients,
    Initialization,
    Layout,
    Precision,
    Recomputation,
    RunSpec,
)
from neox_config.spec.update import DataSpec, LossScaling, UpdateSpec

__all__ = ["Sizes", "read_data", "read_run", "read_update"]

_APEX_INITIAL_SCALE = 2.0**16
_APEX_WINDOW = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What follows from the number of devices.

    Args:
        world: number of devices of the job.
        hosts: number of hosts.
        data: data-parallel size.
        batch: samples per update.
        micro: samples per device and forward pass.
        accumulation: micro-batches per update.
        elastic: numbers of devices that the batch works with.
    """

    world: int
    hosts: int
    data: int
    batch: int
    micro: int
    accumulation: int
    elastic: tuple[int, ...] = ()


def read_run(config: NeoXConfig, sizes: Sizes, model: ModelSpec) -> RunSpec:
    """Return how a configuration whose rules hold runs on devices."""
    precision, batch, engine = _precision(config), _batch(config, sizes), chosen_engine(config)
    gradients = _gradients(config, sizes, precision.weights)
    width, depth = initial_sizes(config)
    return RunSpec(
        layout=_layout(config, sizes),
        engine=Engine(
            name=engine.name,
            reason=engine.reason,
            offers=frozenset(each for each in ENGINES[engine.name] if engine_offers(config, each)),
            settings=deepspeed_settings(config, precision=precision, batch=batch, gradients=gradients),
        ),
        precision=precision,
        batch=batch,
        recomputation=_recomputation(config),
        fusions=_fusions(config),
        compilation=Compilation(
            requested=config.model.compile,
            why_not=why_layers_stay_uncompiled(config),
            why_never=why_layers_stay_uncompiled(config, zero_stage=0),
        ),
        gradients=gradients,
        initialization=Initialization(
            method=config.model.init_method,
            output_method=config.model.output_layer_init_method,
            std=config.model.init_method_std,
            width=width,
            depth=depth,
            seed=config.training.seed,
            on_host=config.model.use_cpu_initialization or config.parallelism.lazy_mpu_init,
        ),
        dropout=Dropout(
            hidden=config.model.hidden_dropout,
            attention=config.model.attention_dropout,
            adapters=config.adapters.lora_dropout,
            token_layers=_layers_that_drop(config),
        ),
        compression=config.compression.compression_training,
        compressible=tuple(compressible_matrices(config)) if compresses(config) else (),
        targets=config.objective,
        experts=config.experts,
        multipliers=read_multipliers(config, model),
    )


def _batch(config: NeoXConfig, sizes: Sizes) -> Batch:
    return Batch(
        length=config.model.seq_length,
        micro=sizes.micro,
        accumulation=sizes.accumulation,
        whole=sizes.batch,
        resets_attention=config.data.reset_attention_mask,
        # Sinusoidal and rotary positions always count from the start of the window.
        resets_positions=config.data.reset_position_ids and config.attention.pos_emb == "learned",
        has_padding=has_padding(config),
    )


def _gradients(config: NeoXConfig, sizes: Sizes, weights: AnyDataType) -> Gradients:
    given, zero = config.engine, config.zero.zero_optimization
    return Gradients(
        # Sums of many bf16 gradients lose small terms, so they are summed in fp32 unless configured.
        accumulate_in=given.data_types.grad_accum_dtype or ("fp32" if weights == "bf16" else weights),
        reduce_in=given.communication_data_type,
        divides_first=given.prescale_gradients,
        predivide_factor=given.gradient_predivide_factor,
        reduce_scatter=zero.reduce_scatter,
        overlaps=zero.overlap_comm,
        reduces_each=zero.stage >= 2 or sizes.accumulation == 1,
    )


def _layout(config: NeoXConfig, sizes: Sizes) -> Layout:
    parallelism, zero = config.parallelism, config.zero.zero_optimization
    is_pipeline = uses_pipeline(config)
    is_torch = is_pipeline and chosen_engine(config).name == "torch"
    return Layout(
        world=sizes.world,
        hosts=sizes.hosts,
        data=sizes.data,
        tensor=max(1, parallelism.model_parallel_size),
        stages=max(1, parallelism.pipe_parallel_size),
        experts=expert_ranks(config),
        splits_sequence=parallelism.sequence_parallel,
        schedule=parallelism.pipeline_schedule if is_torch else "1f1b",
        chunks=chunks_per_stage(config),
        partition=parallelism.pipe_partition_method,
        is_pipeline=is_pipeline,
        zero=zero.stage,
        second_partition=zero.zero_hpz_partition_size,
        offloads_optimizer=zero.offload_optimizer.device != "none",
        elastic=sizes.elastic,
        backend=parallelism.distributed_backend,
    )


def _precision(config: NeoXConfig) -> Precision:
    chosen = config.precision
    weights: DataType = "fp32"
    if chosen.is_fp16:
        weights = "fp16"
    elif chosen.is_bf16:
        weights = "bf16"
    return Precision(
        weights=weights,
        autocast=chosen.autocast,
        loss="fp16" if chosen.fp16_lm_cross_entropy else None,
    )


def _recomputation(config: NeoXConfig) -> Recomputation:
    section = config.activation_checkpointing
    with_fused, without = (recomputes_gated_product(config, is_fused=is_fused) for is_fused in (True, False))
    return Recomputation(
        segment=section.checkpoint_num_layers if recomputes_layers(config) else None,
        attention=recomputes_attention(config),
        product=with_fused if with_fused == without else "fused",
        gathers_inputs=gathers_inputs_again(config),
        partitions_inputs=section.partition_activations,
        inputs_on_host=section.checkpoint_in_cpu,
        slots=(section.number_checkpoints or 0) if section.contiguous_checkpointing else None,
        synchronizes=section.synchronize_each_layer,
        profiles=section.profile_backward,
    )


def _fusions(config: NeoXConfig) -> Fusions:
    model, attention = config.model, config.attention
    return Fusions(
        rope=attention.pos_emb == "rotary" and attention.rope_fusion,
        bias_gelu=model.bias_gelu_fusion,
        glu=model.glu_fusion,
        bias_dropout=model.bias_dropout_fusion,
        layernorm=model.layernorm_fusion,
        rmsnorm=model.rmsnorm_fusion,
        loss=model.loss_fusion,
        causal_softmax=attention.scaled_upper_triang_masked_softmax_fusion,
        masked_softmax=attention.scaled_masked_softmax_fusion,
        apex_norm=model.norm == "apexlayernorm",
        scales_by_layer=attention.apply_query_key_layer_scaling,
        is_for_export=model.onnx_safe,
        has_second_derivatives=config.engine.eigenvalue.enabled,
    )


def _layers_that_drop(config: NeoXConfig) -> frozenset[int]:
    """Return the layers that process a part of the tokens in training."""
    ltd = config.data_efficiency.data_efficiency.data_routing.random_ltd
    return frozenset(ltd.random_ltd_layer_id or ()) if drops_tokens(config) else frozenset()


def read_update(config: NeoXConfig) -> UpdateSpec:
    """Return how a configuration whose rules hold updates the weights."""
    iterations, precision = config.training.train_iters, _precision(config)
    scaling = None
    if precision.autocast == "fp16":
        scaling = _scaling_of_amp(config.precision.amp)
    elif precision.weights == "fp16":
        scaling = _scaling_of_fp16(config.precision.fp16)
    schedule = config.lr_schedule
    is_given = schedule.lr_decay_fraction is None and schedule.lr_decay_iters is not None
    decay = decay_iterations(config) if is_given or iterations is not None else None
    return UpdateSpec(
        iterations=iterations,
        decay_iterations=decay,
        curve=(
            None
            if decay is None or iterations is None
            else learning_rate_curve(config, decay_iterations=decay)
        ),
        optimizer=config.optimizer.optimizer,
        clipping=config.optimizer.gradient_clipping,
        normalization=config.training.loss_normalization,
        scaling=scaling,
    )


def _scaling_of_fp16(fp16: Fp16) -> LossScaling:
    is_dynamic = fp16.loss_scale == 0
    return LossScaling(
        initial=2.0**fp16.initial_scale_power if is_dynamic else fp16.loss_scale,
        is_dynamic=is_dynamic,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _scaling_of_amp(amp: Amp) -> LossScaling:
    """Return the loss scale of NVIDIA apex, which halves it at every overflow."""
    is_dynamic, minimum = amp.loss_scale == 0, amp.min_loss_scale or 1.0
    dynamic = max(minimum, min(_APEX_INITIAL_SCALE, amp.max_loss_scale))
    return LossScaling(
        initial=dynamic if is_dynamic else amp.loss_scale,
        is_dynamic=is_dynamic,
        window=_APEX_WINDOW,
        hysteresis=1,
        minimum=minimum,
        maximum=amp.max_loss_scale,
    )


def read_data(config: NeoXConfig) -> DataSpec:
    """Return the samples of a configuration."""
    return DataSpec(
        length=config.model.seq_length,
        behind_input=tokens_behind_input(config),
        objective=config.model.objective,
        seed=config.training.seed,
        files=config.data,
        targets=config.objective,
        tokenizer=config.tokenizer,
        efficiency=config.data_efficiency,
    )
