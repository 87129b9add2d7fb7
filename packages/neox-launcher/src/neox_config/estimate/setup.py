"""What is estimated: a model and how it runs, with what follows from other settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from neox_config.derive.elasticity import elastic_devices
from neox_config.derive.experts import expert_ranks, inner_widths
from neox_config.derive.layer_compilation import UNCOMPILED_STAGE
from neox_config.errors import ConfigError
from neox_config.extras.compression.fields import LayerReduction
from neox_config.extras.one_bit.local_steps import first_local_step
from neox_config.facts.optimizers import OPTIMIZER_FACTS, OptimizerFacts
from neox_config.facts.tokenizers import TOKENIZER_FACTS
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.tokenizer import TokenizerSection
from neox_config.spec.model import ModelSpec
from neox_config.spec.recorded import recorded_model
from neox_config.spec.resolve import Resolved
from neox_config.spec.run import RunSpec

__all__ = ["Setup", "Teacher", "fewest_devices", "read_vocabulary_size", "setup_of"]

# The sum of a replica's own updates, and a copy of the weights that all replicas have.
_LOCAL_VALUES = 2
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The model with which a student is compared in training.

    Args:
        model: the teacher.
        entries: number of entries of its vocabulary, including padding.
        compares_logits: True if the logits of both are compared, besides hidden states.
        compared_layers: number of layers whose outputs are compared.
    """

    model: ModelSpec
    entries: int
    compares_logits: bool
    compared_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, how it runs, and what the estimates need besides.

    Args:
        model: the model.
        run: how it runs.
        entries: number of entries of the vocabulary, including padding.
        divided: sizes that tensor-parallel ranks divide evenly.
        optimizer: facts about the optimizer.
        states: numbers per parameter that it stores.
        state_bytes: bytes of one of these numbers.
        row_states: float32 numbers per row of each matrix of a linear layer that it stores.
        averages_weights: the averages of weights (ema_decay) are stored, too.
        on_host: the optimizer's states are in host memory.
        weights_on_host: so are the weights.
        bucket: number of gradient elements per reduction.
        live_parameters: maximum number of parameters that ZeRO 3 keeps gathered.
        reduced_bytes: bytes per element of communicated gradients.
        sums_gradients: a second sum of gradients is kept, for the noise scale.
        saves_in_background: checkpoints are copied to host memory first (async_save).
        saves_states: checkpoints contain the optimizer's states.
        weighs_globally: the loss is averaged over the tokens of all micro-batches and replicas.
        teacher: what the model learns from, besides texts; None: nothing.
    """

    model: ModelSpec
    run: RunSpec
    entries: int
    divided: tuple[int, ...]
    optimizer: OptimizerFacts
    states: int
    row_states: int = 0
    state_bytes: int = _FLOAT32
    averages_weights: bool = False
    on_host: bool = False
    weights_on_host: bool = False
    bucket: int
    live_parameters: int
    reduced_bytes: int
    sums_gradients: bool = False
    saves_in_background: bool = False
    saves_states: bool = True
    weighs_globally: bool = False
    teacher: Teacher | None = None

    def changed(self, **parts: Mapping[str, Any]) -> Self:
        """Return the same with other values in these parts of the run."""
        changed = {name: replace(getattr(self.run, name), **values) for name, values in parts.items()}
        return replace(self, run=replace(self.run, **changed))

    @property
    def element_bytes(self) -> int:
        """Bytes per element of weights and activations."""
        return _bytes_of(self.run.precision.weights)

    @property
    def accumulated_bytes(self) -> int:
        """Bytes per element of accumulated gradients."""
        return _bytes_of(self.run.gradients.accumulate_in)

    @property
    def gradient_bytes(self) -> int:
        """The same with the sum for the noise scale."""
        return self.accumulated_bytes + (_FLOAT32 if self.sums_gradients else 0)

    @property
    def has_loss_in_chunks(self) -> bool:
        """True if the loss is computed in chunks, without all logits at once.

        The chunked loss computes gradients before loss scaling, so small ones would underflow in float16.
        """
        return self.run.precision.computes_in != "fp16"

    @property
    def has_second_bucket(self) -> bool:
        """True if DeepSpeed fills a bucket of gradients while it reduces another one."""
        overlaps = self.run.gradients.overlaps
        return self.run.layout.zero == UNCOMPILED_STAGE if overlaps is None else overlaps

    @property
    def gathers_again(self) -> bool:
        """True if the inputs of split matrices are gathered again for the backward pass."""
        is_once = self.run.recomputation.segment is not None or self.run.layout.splits_backward
        return self.run.layout.splits_sequence and not is_once

    @property
    def is_sharded_by_torch(self) -> bool:
        """True if `fully_shard` partitions the weights, which takes several data-parallel ranks."""
        return self.run.partitions_rows and self.run.layout.data > 1

    @property
    def row_ranks(self) -> int:
        """Number of ranks that divide the rows of all weights."""
        return self.run.layout.data if self.is_sharded_by_torch else 1

    @property
    def reduces_every_time(self) -> bool:
        """True if `fully_shard` reduces the gradients of each micro-batch, so that only parts are stored."""
        return self.run.layout.zero >= 2 or self.run.batch.accumulation == 1

    @property
    def devices(self) -> int:
        """Number of all devices."""
        layout = self.run.layout
        return layout.tensor * layout.stages * layout.data

    @property
    def samples(self) -> int:
        """Samples per update."""
        return self.run.batch.micro * self.run.batch.accumulation * self.run.layout.data

    @property
    def recomputes(self) -> bool:
        """True if layers, or attention in them, are recomputed."""
        return self.run.recomputation.segment is not None or self.run.recomputation.attention

    def compiles_on(self, device: str) -> bool:
        """Return True if layers are compiled on a type of device.

        On GPUs, `auto` compiles the layers of all but short runs, unless each needs a separate graph.
        """
        compilation = self.run.compilation
        if self.run.layout.zero == UNCOMPILED_STAGE or compilation.why_never is not None:
            return False
        if compilation.requested == "auto":
            return device == "cuda" and not self.run.fusions.scales_by_layer
        return compilation.requested

    def reduces_early(self, device: str) -> bool:
        """Return True if gradients of whole weights are averaged during the backward pass."""
        return self.run.layout.data > 1 and self.run.reduces_early(on_gpu=device == "cuda")


def fewest_devices(config: NeoXConfig) -> int:
    """Return the fewest devices; those of the implied copies if all three batch sizes are given."""
    parallel, training = config.parallelism, config.training
    copy = max(1, parallel.model_parallel_size) * max(1, parallel.pipe_parallel_size)
    if config.elasticity.elasticity.enabled:
        return _fewest_elastic(config, copy)
    per_copy = (training.train_micro_batch_size_per_gpu or 0) * (training.gradient_accumulation_steps or 0)
    if training.train_batch_size and per_copy and training.train_batch_size % per_copy == 0:
        return copy * (training.train_batch_size // per_copy)
    return copy * expert_ranks(config)


def _fewest_elastic(config: NeoXConfig, copy: int) -> int:
    block, ranks = config.elasticity.elasticity, expert_ranks(config)
    try:
        return min(elastic_devices(block, devices_per_copy=copy, copies=ranks))
    except ValueError:
        # `resolve` reports the error.
        return copy


def setup_of(resolved: Resolved, *, vocab_size: int) -> Setup:
    """Return what is estimated for a configuration.

    Args:
        resolved: the configuration.
        vocab_size: number of entries of the tokenizer, without padding.
    """
    config, run = resolved.config, resolved.run
    zero, logged = config.zero.zero_optimization, config.logging
    kind, arguments = config.optimizer.optimizer.kind, config.optimizer.optimizer.params.given()
    facts = OPTIMIZER_FACTS[kind]
    has_local_steps = first_local_step(config) is not None
    # Stage 0 reduces gradients by default in the data type of their sum.
    reduced = run.gradients.reduce_in or (
        run.gradients.accumulate_in if run.layout.zero == 0 else run.precision.weights
    )
    return Setup(
        model=resolved.model,
        run=run,
        entries=resolved.model.embedding.entries(vocab_size),
        divided=(
            config.model.num_kv_heads or config.model.num_attention_heads,
            *inner_widths(config).values(),
        ),
        optimizer=facts,
        states=facts.values_per_element(arguments) + (_LOCAL_VALUES if has_local_steps else 0),
        row_states=facts.values_per_row(arguments),
        state_bytes=_bytes_of(config.optimizer.optimizer.params.state_dtype),
        averages_weights=config.optimizer.ema_decay is not None,
        on_host=zero.offload_optimizer.device != "none" or kind.startswith("cpu_"),
        weights_on_host=zero.offload_param.device != "none",
        bucket=zero.reduce_bucket_size,
        live_parameters=zero.stage3_max_live_parameters,
        reduced_bytes=_bytes_of(reduced),
        sums_gradients=logged.log_gradient_noise_scale and not logged.gradient_noise_scale_cpu_offload,
        saves_in_background=config.checkpoint.save is not None and config.checkpoint.async_save,
        saves_states=not config.checkpoint.no_save_optim,
        weighs_globally=resolved.update.normalization == "global",
        teacher=_teacher(resolved.model, config.compression.compression_training.layer_reduction, vocab_size),
    )


def _teacher(student: ModelSpec, section: LayerReduction, vocab_size: int) -> Teacher | None:
    """Return the teacher, which is read from its checkpoint if it is there.

    A teacher that is not there is taken to be like the student, with the layers that the student copies.
    """
    if not (section.enabled and section.distill.enabled):
        return None
    taken = section.teacher_layer or ()
    found = recorded_model(Path(section.teacher)) if section.teacher is not None else None
    if found is not None:
        model = found.model
    else:
        layers = max(len(student.layers), *(layer + 1 for layer in taken)) if taken else len(student.layers)
        more = (student.layers[-1],) * (layers - len(student.layers))
        own = tuple(replace(layer, owner=None) for layer in student.layers + more)
        model = replace(student, layers=own)
    return Teacher(
        model=model,
        entries=model.embedding.entries(vocab_size),
        compares_logits=section.distill.logits_share > 0,
        compared_layers=len(taken) if section.distill.hidden_states_weight else 0,
    )


def _bytes_of(dtype: str) -> int:
    return _FLOAT32 if dtype == "fp32" else 2


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
