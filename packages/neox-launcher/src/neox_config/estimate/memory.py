"""Memory estimate: tensors that are stored for the backward pass; allocator overhead is not included.

Known limit: without the fused softmax kernels, the attention scores need slightly more memory.

Sources: arXiv:2205.05198 (activations, for the operators in use), arXiv:1910.02054 (ZeRO).
"""

from dataclasses import dataclass, replace
from math import ceil

from neox_config.estimate.operations import keys_per_query
from neox_config.estimate.parameters import (
    bucketed_parameters,
    largest_block,
    largest_tensor,
    local_parameters,
    local_state_values,
    outside_blocks,
    replica_values,
    stage_types,
    trained_parameters,
)
from neox_config.estimate.shapes import Layout, Shape
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.collectives import EARLY_ELEMENTS
from neox_config.facts.loss import BLOCK_NUMBERS, CHUNK_NUMBERS
from neox_config.facts.norms import NORM_FACTS
from neox_config.facts.pipeline_schedules import most_passes_in_flight

__all__ = [
    "Memory",
    "activation_bytes_per_layer",
    "device_memory",
    "flowing_bytes",
    "hidden_bytes",
]

# Device memory of a process that is not used by tensors, by type of device: the context of CUDA, and the
# workspaces of NCCL and cuBLAS.
_RUNTIME_BYTES = {"cuda": 2**30, "cpu": 0}
# Autocast computes in float16 or bfloat16.
_CAST_BYTES = 2
# The compressed average of momenta holds 15 bytes for each element that it averages at once: at most this
# number, or one larger tensor.
_AVERAGED_BYTES, _AVERAGED_ELEMENTS = 15, 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one device in bytes, and of host memory used for it.

    Args:
        host: host memory for what is offloaded.
        snapshot: host memory for the copy that an asynchronous save writes.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int
    snapshot: int

    @property
    def total(self) -> int:
        """Memory on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def device_memory(shape: Shape, layout: Layout, stage: int = 0, *, device: str = "cuda") -> Memory:
    """Return the peak memory of one device of a pipeline stage.

    `benchmarks/memory.py` compares it with the tensors of real processes.

    Args:
        shape: the model.
        layout: how it is run.
        stage: the pipeline stage.
        device: type of the devices (cuda, cpu), on which the memory of the runtime, the chunks of the loss
            and the messages of gradients depend.
    """
    if layout.engine == "torch" and layout.data_parallel == 1:
        # There is nothing to partition.
        layout = replace(layout, zero_stage=0)
    activations = _stage_activations(shape, layout, stage, device)
    if layout.is_sharded_by_torch:
        weights, gradients, optimizer = _sharded_states(shape, layout, stage)
        host = 0
    else:
        weights, gradients, optimizer, host = _states(shape, layout, stage)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=_buffers(shape, layout, stage, activations, device),
        host=host + _inputs_on_host(shape, layout, stage),
        snapshot=_snapshot(shape, layout, stage),
    )


def _sharded_states(shape: Shape, layout: Layout, stage: int) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer with `fully_shard`.

    A rank's parts of the weights are float32, and are counted with the states. Whole weights exist besides:
    all of them at stages 1 and 2; at stage 3 those of a layer, and what is outside the layers.
    """
    local, trained = local_parameters(shape, layout, stage), trained_parameters(shape, layout, stage)
    part, size = ceil(trained / layout.data_parallel), layout.element_bytes
    weights = size * local
    if layout.zero_stage == 3:
        gathered = largest_block(shape, layout, stage) + outside_blocks(shape, layout, stage)
        weights = size * (min(local, gathered) + ceil((local - trained) / layout.data_parallel))
    summed = 4 * part if layout.reduces_every_time else layout.accumulated_bytes * trained
    of_noise_scale = layout.gradient_bytes - layout.accumulated_bytes
    states = local_state_values(shape, layout, stage, row_ranks=layout.data_parallel)
    return weights, summed + of_noise_scale * part, 4 * (part + states)


def _states(shape: Shape, layout: Layout, stage: int) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients and optimizer without `fully_shard`, and those on the host.

    Source: arXiv:1910.02054, section 3 (16-bit weights and gradients, float32 master weights and moments) and
    section 5 (partitioning of each stage of ZeRO).
    """
    local = local_parameters(shape, layout, stage)
    zero = layout.zero_stage
    weights = layout.element_bytes * (ceil(local / layout.data_parallel) if zero >= 3 else local)
    # Weights that are not trained have neither gradients nor states.
    trained = trained_parameters(shape, layout, stage)
    shared = ceil(trained / layout.data_parallel)
    gradients = layout.gradient_bytes * (shared if zero >= 2 else trained)
    master = 4 if layout.element_bytes < 4 else 0
    # ZeRO accepts only optimizers with the same states for every element.
    values = layout.optimizer_states * shared if zero >= 1 else local_state_values(shape, layout, stage)
    optimizer = master * (shared if zero >= 1 else trained) + 4 * values
    host = 0
    if layout.optimizer_on_host:
        host, optimizer = optimizer, 0
        if zero >= 2:
            host, gradients = host + gradients, 0
    if layout.parameters_on_host:
        host, weights = host + weights, 0
    return weights, gradients, optimizer, host


def _snapshot(shape: Shape, layout: Layout, stage: int) -> int:
    """Return the mean size of a rank's shard: the data-parallel ranks divide the float32 weights and states.

    Without ZeRO they divide whole tensors, so that some ranks need more than the mean.
    """
    if not layout.saves_in_background:
        return 0
    local, of_replica = trained_parameters(shape, layout, stage), 0
    if not layout.saves_states:
        values = 0
    else:
        # Every replica writes the states that only it has.
        of_replica = replica_values(shape, layout, stage)
        values = local_state_values(shape, layout, stage) - of_replica
    return 4 * (ceil((local + values) / layout.data_parallel) + of_replica)


def activation_bytes_per_layer(shape: Shape, layout: Layout, kind: str = "global") -> int:
    """Return the bytes that one layer stores per micro-batch for the backward pass, on one device.

    For a standard transformer with dropout and materialized scores: s b h (10 + 24 / t + 5 a s / (h t)).

    Source: arXiv:2205.05198, section 4; flash attention stores one float32 number per query and head instead
    of scores.
    """
    size, width, ranks = layout.element_bytes, shape.hidden_size, layout.model_parallel
    dropped = width if shape.hidden_dropout > 0 else 0
    tokens = _tokens(shape, layout)
    sharers = ranks if layout.splits_sequence else 1
    if ATTENTION_FACTS[kind].is_gmlp:
        # The norm's input and dropout's mask; `up`'s input; 8h before and after the activation, and of 4h v's
        # norm, mixed v, product.
        between = _kept_by_norm(shape, size, width) + dropped
        whole = size * width
        split = (2 * 8 * size * width + 12 * size * width) + _kept_by_norm(shape, size, 4 * width)
    else:
        between = 2 * _kept_by_norm(shape, size, width) + 2 * dropped
        whole = 2 * size * width
        split = _kept_by_attention(shape, size) + _kept_by_mlp(shape, size)
        if not layout.recomputes_attention:
            split += _kept_by_scores(shape, size, kind)
    if layout.gathers_again:
        # The inputs of split matrices are gathered again for the backward pass.
        between, whole = between + whole, 0
    return tokens * (ceil(between / sharers) + whole + ceil(split / ranks))


def _kept_by_norm(shape: Shape, size: int, width: int) -> int:
    """Return the bytes per token of a norm: its input, or two float32 tensors if it is not fused."""
    return NORM_FACTS[shape.norm].kept_bytes(width, size)


def _kept_by_mlp(shape: Shape, size: int) -> int:
    """Return the bytes per token of a feed-forward block: outputs of projections and activation."""
    kept = ACTIVATION_FACTS[shape.activation].kept_tensors
    tensors = kept + 3 if shape.is_gated else kept + 1
    return tensors * size * shape.mlp_width


def _kept_by_attention(shape: Shape, size: int) -> int:
    """Return the bytes per token of attention without its scores: query, key, value and context."""
    width, key_width = shape.hidden_size, shape.key_width
    kept = 2 * width + 2 * key_width
    if shape.position == "rotary" and not shape.keeps_scores:
        # Query and key are rotated into new tensors, while the value keeps the memory of all three alive.
        kept += width + key_width
    elif width // shape.heads < key_width < width:
        # Queries that share a key are copied, because they are interleaved with the keys.
        kept += width
    return kept * size


def _kept_by_scores(shape: Shape, size: int, kind: str) -> int:
    """Return the bytes per token of the scores, or of their sums if scores are not stored."""
    if not shape.keeps_scores:
        return 4 * shape.heads
    per_score = 2 * size + 1 if shape.attention_dropout > 0 else size
    return per_score * shape.heads * keys_per_query(shape, kind)


def _stage_activations(shape: Shape, layout: Layout, stage: int, device: str) -> int:
    """Return the activations of all micro-batches in flight, plus the peak of a single one."""
    kinds = stage_types(shape, layout, stage)
    per_layer = {kind: activation_bytes_per_layer(shape, layout, kind) for kind in set(kinds)}
    working = 0
    kept = sum(per_layer[kind] for kind in kinds)
    if layout.segment_layers is not None:
        working = max((per_layer[kind] for kind in kinds), default=0) * min(layout.segment_layers, len(kinds))
        # Layers of one tower are recomputed at a time.
        working = ceil(working / shape.towers)
        kept = 0 if layout.inputs_on_host else _segment_inputs(shape, layout, len(kinds))
    elif layout.recomputes_attention:
        working = max((_scores_of_layer(shape, layout, kind) for kind in kinds), default=0)
    if stage == 0 and shape.hidden_dropout > 0:
        mask = _tokens(shape, layout) * shape.hidden_size
        kept += ceil(mask / layout.model_parallel) if layout.splits_sequence else mask
    return kept * _in_flight(layout, stage) + max(working, _head_activations(shape, layout, stage, device))


def _scores_of_layer(shape: Shape, layout: Layout, kind: str) -> int:
    """Return the bytes of the scores of one layer while it is recomputed."""
    if ATTENTION_FACTS[kind].is_gmlp:
        return 0
    tokens = _tokens(shape, layout)
    return tokens * ceil(_kept_by_scores(shape, layout.element_bytes, kind) / layout.model_parallel)


def _segment_inputs(shape: Shape, layout: Layout, layers: int) -> int:
    assert layout.segment_layers is not None
    segments = ceil(layers / layout.segment_layers)
    if layout.splits_inputs:
        return segments * ceil(hidden_bytes(shape, layout) / layout.model_parallel)
    return segments * flowing_bytes(shape, layout)


def _inputs_on_host(shape: Shape, layout: Layout, stage: int) -> int:
    if layout.segment_layers is None or not layout.inputs_on_host:
        return 0
    layers = len(stage_types(shape, layout, stage))
    return _segment_inputs(shape, layout, layers) * _in_flight(layout, stage)


def _head_activations(shape: Shape, layout: Layout, stage: int, device: str) -> int:
    """Return the activations of the head on the last stage: inputs of norm and projection, and the loss."""
    if stage != layout.stages - 1:
        return 0
    size, width = layout.element_bytes, shape.hidden_size
    tokens = _tokens(shape, layout)
    kept_by_norm = tokens * _kept_by_norm(shape, size, width)
    if layout.splits_sequence:
        kept_by_norm = ceil(kept_by_norm / layout.model_parallel)
    if shape.embedding_size is not None:
        # Only the first token of each text is projected.
        return kept_by_norm
    loss = _loss_in_chunks if layout.has_loss_in_chunks else _loss_of_all_logits
    return kept_by_norm + size * tokens * width + loss(shape, layout, tokens, device)


def _loss_of_all_logits(shape: Shape, layout: Layout, tokens: int, device: str) -> int:
    """Return the bytes of the logits and their gradient."""
    return 2 * layout.element_bytes * tokens * ceil(shape.vocab_size / layout.model_parallel)


def _loss_in_chunks(shape: Shape, layout: Layout, tokens: int, device: str) -> int:
    """Return the bytes of the logits of a chunk, partly in float32, and of the gradients of both factors.

    The gradient of the output matrix is accumulated in float32; with a smaller data type, the product of a
    chunk is stored as well.
    """
    size, entries = layout.element_bytes, ceil(shape.vocab_size / layout.model_parallel)
    logits = min(tokens, max(1, CHUNK_NUMBERS[device] // entries)) * entries
    matrix = (4 if size == 4 else 4 + size) * entries * shape.hidden_size
    return size * logits + 4 * min(logits, BLOCK_NUMBERS[device]) + matrix + size * tokens * shape.hidden_size


def _in_flight(layout: Layout, stage: int) -> int:
    """Return the number of micro-batches of a stage between their forward and backward pass."""
    passes = most_passes_in_flight(
        layout.schedule,
        stage=stage,
        stages=layout.stages,
        chunks=layout.chunks,
        micro_batches=layout.accumulation,
    )
    return ceil(passes / layout.chunks)


def _tokens(shape: Shape, layout: Layout) -> int:
    """Return the tokens of a micro-batch."""
    return shape.texts * shape.seq_length * layout.micro_batch


def hidden_bytes(shape: Shape, layout: Layout) -> int:
    """Return the bytes of the hidden states of one micro-batch."""
    return layout.element_bytes * _tokens(shape, layout) * shape.hidden_size


def flowing_bytes(shape: Shape, layout: Layout) -> int:
    """Return the bytes of the hidden states that one rank holds between two layers."""
    whole = hidden_bytes(shape, layout)
    return ceil(whole / layout.model_parallel) if layout.splits_sequence else whole


def _buffers(shape: Shape, layout: Layout, stage: int, activations: int, device: str) -> int:
    """Return the bytes of gradient buckets, parameters gathered by ZeRO 3, pipelines, and the runtime.

    What exists when the activations are freed is counted as far as it exceeds them.
    """
    total, local = _RUNTIME_BYTES[device], local_parameters(shape, layout, stage)
    trained = trained_parameters(shape, layout, stage)
    if layout.reduces_early(device):
        total += layout.reduced_bytes * min(trained, EARLY_ELEMENTS)
    elif layout.zero_stage == 0 and layout.data_parallel > 1:
        bucket = max(bucketed_parameters(shape, layout, device=device), default=0)
        total += max(0, layout.reduced_bytes * min(trained, bucket) - activations)
    if layout.has_replica_states and layout.data_parallel > 1:
        at_once = max(_AVERAGED_ELEMENTS, largest_tensor(shape, layout, stage))
        total += _AVERAGED_BYTES * min(trained, at_once)
    if layout.autocasts:
        # A forward pass casts each weight once, and the backward pass of the same micro-batch uses the copy.
        # Recomputed segments do not keep it.
        kept = 1 if layout.segment_layers is not None else _in_flight(layout, stage)
        total += _CAST_BYTES * local * kept
    if layout.is_sharded_by_torch:
        total += _gathered(shape, layout, stage, activations)
    elif layout.zero_stage >= 1 and layout.engine == "deepspeed":
        total += layout.element_bytes * layout.bucket * (2 if layout.has_second_bucket else 1)
        if layout.zero_stage == 3:
            total += layout.element_bytes * min(local, layout.live_parameters)
    if layout.stages > 1:
        # The output of the stage per micro-batch in flight, plus a gradient in the backward pass.
        total += flowing_bytes(shape, layout) * (_in_flight(layout, stage) + 1)
    return total


def _gathered(shape: Shape, layout: Layout, stage: int, activations: int) -> int:
    """Return the bytes that `fully_shard` needs in the backward pass beyond states and activations.

    A layer has whole gradients, and a flat copy of them while they are reduced; its activations are freed
    then. What is outside the layers has gradients from the loss on, which are reduced when all activations
    are freed.
    """
    size, layer = layout.element_bytes, largest_block(shape, layout, stage)
    outside = outside_blocks(shape, layout, stage)
    if not layout.reduces_every_time:
        return 0
    both = size + layout.reduced_bytes
    kinds = stage_types(shape, layout, stage)
    freed = max((activation_bytes_per_layer(shape, layout, kind) for kind in set(kinds)), default=0)
    in_layers = size * outside + max(0, both * layer - freed)
    at_end = both * outside + 4 * ceil(outside / layout.data_parallel) - activations
    return max(in_layers, at_end)
