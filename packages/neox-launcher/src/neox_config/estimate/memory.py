"""Memory estimate: tensors that are stored for the backward pass; allocator overhead is not included.

Known limit: without the fused softmax kernels, the attention scores need slightly more memory.

On GPUs, layers are assumed to be compiled unless the configuration rules it out: what is elementwise is then
computed again in the backward pass instead of stored.

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
from neox_config.estimate.shapes import Layout, Shape, Teacher
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
_FLOAT32 = 4
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
        reused: bytes of gradients that take the place of activations, which are counted in both.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int
    snapshot: int
    reused: int

    @property
    def total(self) -> int:
        """Memory on the device."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.buffers - self.reused


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activations:
    """Bytes of activations when the backward pass begins, and those that its end uses."""

    at_start: int
    at_end: int


def device_memory(shape: Shape, layout: Layout, stage: int = 0, *, device: str = "cuda") -> Memory:
    """Return the peak memory of one device of a pipeline stage.

    `benchmarks/memory.py` compares it with the tensors of real processes.

    Args:
        shape: the model.
        layout: how it is run.
        stage: the pipeline stage.
        device: type of the devices (cuda, cpu), on which the memory of the runtime, stored activations, the
            chunks of the loss and the messages of gradients depend.
    """
    if layout.engine == "torch" and layout.data_parallel == 1:
        # There is nothing to partition.
        layout = replace(layout, zero_stage=0, compiles=layout.compiles_on(device))
    activations = _stage_activations(shape, layout, stage, device)
    weights_of_teacher = 0
    if shape.teacher is not None:
        weights_of_teacher = layout.element_bytes * local_parameters(shape.teacher.shape, layout, stage)
    if layout.is_sharded_by_torch:
        weights, gradients, optimizer = _sharded_states(shape, layout, stage)
        host = 0
    else:
        weights, gradients, optimizer, host = _states(shape, layout, stage)
    reused = _reused(shape, layout, stage, gradients, activations)
    return Memory(
        weights=weights + weights_of_teacher,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations.at_start,
        buffers=_buffers(shape, layout, stage, activations.at_start - reused, device),
        host=host + _inputs_on_host(shape, layout, stage),
        snapshot=_snapshot(shape, layout, stage),
        reused=reused,
    )


def _reused(shape: Shape, layout: Layout, stage: int, gradients: int, activations: _Activations) -> int:
    """Return the bytes of gradients that take the place of activations.

    With one micro-batch per update there are no gradients before its backward pass, which frees a layer's
    activations as it computes the gradients of its weights: the peak is at its beginning or at its end. A sum
    for the noise scale, and DeepSpeed's buffers, are there all the time.
    """
    if layout.accumulation > 1 or (layout.engine == "deepspeed" and layout.zero_stage > 0):
        return 0
    trained = trained_parameters(shape, layout, stage)
    parts = layout.data_parallel if layout.is_sharded_by_torch else 1
    lasting = (layout.gradient_bytes - layout.accumulated_bytes) * ceil(trained / parts)
    return max(0, min(gradients - lasting, activations.at_start - activations.at_end))


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


def activation_bytes_per_layer(
    shape: Shape, layout: Layout, kind: str = "global", *, device: str = "cuda"
) -> int:
    """Return the bytes that one layer stores per micro-batch for the backward pass, on one device of a type.

    For a standard transformer with dropout and materialized scores: s b h (10 + 24 / t + 5 a s / (h t)).

    Source: arXiv:2205.05198, section 4; flash attention stores one float32 number per query and head instead
    of scores.
    """
    size, width, ranks = layout.element_bytes, shape.hidden_size, layout.model_parallel
    dropped = width if shape.hidden_dropout > 0 else 0
    tokens = _tokens(shape, layout)
    sharers = ranks if layout.splits_sequence else 1
    is_compiled = layout.compiles_on(device)
    norm = _kept_by_norm(shape, layout, width, device)
    if ATTENTION_FACTS[kind].is_gmlp:
        # The norm's input and dropout's mask; `up`'s input; both halves of its output. The activation of one
        # is an input of the product, that of the other of a norm; normed, mixed, and the product.
        between = norm + dropped
        whole = size * width
        split = 5 * size * 4 * width
        if not is_compiled:
            split += size * 4 * width + _kept_by_norm(shape, layout, 4 * width, device)
    else:
        between = 2 * norm + 2 * dropped
        if shape.parallel_residual and norm == size * width:
            # Both norms store the same input.
            between -= norm
        whole = 2 * size * width
        split = _kept_by_attention(shape, size, is_compiled=is_compiled)
        split += _kept_by_mlp(shape, layout, is_compiled=is_compiled)
        if not layout.recomputes_attention:
            split += _kept_by_scores(shape, size, kind)
    if layout.gathers_again:
        # The inputs of split matrices are gathered again for the backward pass.
        between, whole = between + whole, 0
    return tokens * (ceil(between / sharers) + whole + ceil(split / ranks))


def _kept_by_norm(shape: Shape, layout: Layout, width: int, device: str) -> int:
    """Return the bytes per token of a norm: its input, or two float32 tensors if it is several operators."""
    is_one = layout.compiles_on(device) or device in NORM_FACTS[shape.norm].one_operator_on
    return (layout.element_bytes if is_one else 8) * width


def _kept_by_mlp(shape: Shape, layout: Layout, *, is_compiled: bool) -> int:
    """Return the bytes per token of a feed-forward block: outputs of projections and activation.

    A compiled layer stores the inputs of matrix products and what they return, and computes the activation
    from them again. Of an activation without stored tensors, it stores where the input is positive.
    """
    kept, size = ACTIVATION_FACTS[shape.activation].kept_tensors, layout.element_bytes
    if is_compiled:
        each = 3 * size if shape.is_gated else 2 * size if kept else size + 1
        return each * shape.mlp_width
    tensors = kept + 1
    if shape.is_gated:
        # A kernel keeps none but up, gate and the product.
        tensors = 2 if layout.recomputes_product else 3 if layout.fuses_gate else kept + 3
    return tensors * size * shape.mlp_width


def _kept_by_attention(shape: Shape, size: int, *, is_compiled: bool) -> int:
    """Return the bytes per token of attention without its scores: query, key, value and context."""
    width, key_width = shape.hidden_size, shape.key_width
    kept = 2 * width + 2 * key_width
    if shape.rotates_in_place and not is_compiled:
        return kept * size
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


def _stage_activations(shape: Shape, layout: Layout, stage: int, device: str) -> _Activations:
    """Return the activations of all micro-batches in flight, plus the peak of a single one."""
    kinds = stage_types(shape, layout, stage)
    per_layer = _of_kinds(shape, layout, stage, device)
    layer, working = max(per_layer.values(), default=0), 0
    kept = sum(per_layer[kind] for kind in kinds)
    if layout.segment_layers is not None:
        # Layers of one tower are recomputed at a time.
        working = ceil(layer * min(layout.segment_layers, len(kinds)) / shape.towers)
        layer, kept = 0, 0 if layout.inputs_on_host else _segment_inputs(shape, layout, len(kinds))
    elif layout.recomputes_attention:
        working = max((_scores_of_layer(shape, layout, kind) for kind in kinds), default=0)
    if stage == 0 and shape.hidden_dropout > 0:
        mask = _tokens(shape, layout) * shape.hidden_size
        kept += ceil(mask / layout.model_parallel) if layout.splits_sequence else mask
    single = max(working, _head_activations(shape, layout, stage, device))
    return _Activations(at_start=kept * _in_flight(layout, stage) + single, at_end=layer + working)


def _of_kinds(shape: Shape, layout: Layout, stage: int, device: str) -> dict[str, int]:
    """Return the bytes that a layer of each kind in a stage stores for a micro-batch."""
    kinds = set(stage_types(shape, layout, stage))
    return {kind: activation_bytes_per_layer(shape, layout, kind, device=device) for kind in kinds}


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
    kept_by_norm = tokens * _kept_outside(shape, layout, device)
    if layout.splits_sequence:
        kept_by_norm = ceil(kept_by_norm / layout.model_parallel)
    if shape.embedding_size is not None:
        # Only the first token of each text is projected.
        return kept_by_norm
    loss = _loss_in_chunks if layout.has_loss_in_chunks else _loss_of_all_logits
    of_loss = loss(shape, layout, tokens, device)
    if shape.teacher is not None:
        of_loss = _loss_with_teacher(shape.teacher, layout, tokens, of_loss)
    return kept_by_norm + size * tokens * width + of_loss


def _kept_outside(shape: Shape, layout: Layout, device: str) -> int:
    """Return the bytes per token of the last norm, which is outside the layers and is not compiled."""
    return _kept_by_norm(shape, replace(layout, compiles=False), shape.hidden_size, device)


def _loss_with_teacher(teacher: Teacher, layout: Layout, tokens: int, alone: int) -> int:
    """Return the bytes of the loss of a student: the hidden states of its teacher, and what both logits take.

    The divergence of logits has five float32 tensors besides the logits of both: what the cross entropy
    keeps, and four of the whole vocabulary, which tensor-parallel ranks gather. The layers of the teacher run
    before it, one at a time, and keep nothing.
    """
    size, shape, ranks = layout.element_bytes, teacher.shape, layout.model_parallel
    hidden = teacher.compared_layers * size * tokens * shape.hidden_size
    projections = 3 if shape.is_gated else 2
    layer = size * tokens * (3 * shape.hidden_size + ceil(projections * shape.mlp_width / ranks))
    if not teacher.compares_logits:
        return max(alone, layer + hidden)
    entries = tokens * shape.vocab_size
    logits = (2 * size + _FLOAT32) * ceil(entries / ranks) + 4 * _FLOAT32 * entries
    gathered = 2 * size * entries if ranks > 1 else 0
    return max(logits + gathered, layer) + hidden


def _loss_of_all_logits(shape: Shape, layout: Layout, tokens: int, device: str) -> int:
    """Return the bytes of the logits and their gradient."""
    return 2 * layout.element_bytes * tokens * ceil(shape.vocab_size / layout.model_parallel)


def _loss_in_chunks(shape: Shape, layout: Layout, tokens: int, device: str) -> int:
    """Return the bytes of the logits of two chunks, or of one partly in float32, and of both gradients.

    A chunk's logits are freed when those of the next are computed. The gradient of the matrix is summed in
    float32. With a smaller data type, that of weights, it is cast after the last chunk; the product of a
    chunk is stored as well, except on a GPU, which adds it in the same kernel.
    """
    size, entries = layout.element_bytes, ceil(shape.vocab_size / layout.model_parallel)
    rows = min(tokens, max(1, CHUNK_NUMBERS[device] // entries))
    logits, following = rows * entries, min(rows, tokens - rows) * entries
    elements = entries * shape.hidden_size
    working = size * (logits + following)
    if size < _FLOAT32:
        block = _FLOAT32 * min(logits, BLOCK_NUMBERS[device])
        product = size * elements if device == "cpu" else 0
        working = max(working, size * logits + max(block, product), size * elements)
    return working + _FLOAT32 * elements + size * tokens * shape.hidden_size


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


def _buffers(shape: Shape, layout: Layout, stage: int, freed: int, device: str) -> int:
    """Return the bytes of gradient buckets, parameters gathered by ZeRO 3, pipelines, and the runtime.

    What exists when the activations are freed is counted as far as it exceeds the bytes freed.
    """
    total, local = _RUNTIME_BYTES[device], local_parameters(shape, layout, stage)
    trained = trained_parameters(shape, layout, stage)
    if layout.reduces_early(device):
        total += layout.reduced_bytes * min(trained, EARLY_ELEMENTS)
    elif layout.zero_stage == 0 and layout.data_parallel > 1:
        bucket = max(bucketed_parameters(shape, layout, device=device), default=0)
        total += max(0, layout.reduced_bytes * min(trained, bucket) - freed)
    if layout.has_replica_states and layout.data_parallel > 1:
        at_once = max(_AVERAGED_ELEMENTS, largest_tensor(shape, layout, stage))
        total += _AVERAGED_BYTES * min(trained, at_once)
    if layout.autocasts:
        # A forward pass casts each weight once, and the backward pass of the same micro-batch uses the copy.
        # Recomputed segments do not keep it.
        kept = 1 if layout.segment_layers is not None else _in_flight(layout, stage)
        total += _CAST_BYTES * local * kept
    if layout.is_sharded_by_torch:
        total += _gathered(shape, layout, stage, freed, device)
    elif layout.zero_stage >= 1 and layout.engine == "deepspeed":
        total += layout.element_bytes * layout.bucket * (2 if layout.has_second_bucket else 1)
        if layout.zero_stage == 3:
            total += layout.element_bytes * min(local, layout.live_parameters)
    if layout.stages > 1:
        # The output of the stage per micro-batch in flight, plus a gradient in the backward pass.
        total += flowing_bytes(shape, layout) * (_in_flight(layout, stage) + 1)
    return total


def _gathered(shape: Shape, layout: Layout, stage: int, freed: int, device: str) -> int:
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
    of_layer = max(_of_kinds(shape, layout, stage, device).values(), default=0)
    in_layers = size * outside + max(0, both * layer - of_layer)
    at_end = both * outside + 4 * ceil(outside / layout.data_parallel) - freed
    return max(in_layers, at_end)
