"""What a training costs, from plain numbers: parameters, memory, operations, communication and time.

Everything follows from two records of `shapes.py`: `Shape` is the model, `Layout` is how it is run.

Parameter counts are exact. Memory is what the tensors need that our layers keep for the backward pass (the
counting of arXiv:2205.05198, applied to the operators in use); allocators waste some per cent more.
Operations follow arXiv:2104.04473: two per multiply-add, attention not halved for causality. Communication
is the bytes that the busiest device sends, with ring collectives.

Known limits: stages hold equal numbers of layers whatever `pipe-partition-method` says, and without the fused
softmax kernels the score path needs some more memory.

Sources: arXiv:2205.05198 (activations), arXiv:1910.02054 (ZeRO), arXiv:2104.04473 (operations, pipeline
bubble), arXiv:1909.08053 (tensor parallelism), arXiv:2105.08050 (gMLP).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from neox_launcher.config.shapes import Layout, Shape

__all__ = [
    "Communication",
    "Estimate",
    "Memory",
    "Weights",
    "activation_bytes_per_layer",
    "bubble_share",
    "communication_bytes",
    "count_parameters",
    "device_memory",
    "estimate",
    "flops_per_token",
    "local_parameters",
]

# What a process holds on a device beside tensors: the CUDA context, NCCL's and cuBLAS's workspaces.
RUNTIME_BYTES = 2**30
# Logits that the loss in chunks makes at a time, and those of them it works on in float32.
CHUNK_NUMBERS, BLOCK_NUMBERS = 2**27, 2**26
# Tensors of the inner width that an activation keeps beside its result.
_KEPT_BY_ACTIVATION = {"relu": 0, "reglu": 0, "softsign": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one device, and of the host for it."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Bytes that the busiest device sends for one update, by group."""

    data: int
    model: int
    pipe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All that is known about one way to train.

    Args:
        parameters: by part.
        memory: of a device of each pipeline stage.
        flops_per_token: forward and backward pass, without recomputation.
        computed_flops_per_token: with it.
        bubble: part of the time that a stage waits for the others.
    """

    shape: Shape
    layout: Layout
    parameters: Mapping[str, int]
    memory: tuple[Memory, ...]
    flops_per_token: int
    computed_flops_per_token: int
    communication: Communication
    bubble: float

    @property
    def total_parameters(self) -> int:
        """Of the whole model."""
        return sum(self.parameters.values())

    @property
    def fullest_stage(self) -> int:
        """The pipeline stage whose devices need most."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def tokens_per_iteration(self) -> int:
        """Of one update, over all devices."""
        return self.layout.samples * self.shape.seq_length

    @property
    def flops_per_iteration(self) -> int:
        """Of one update, over all devices, without recomputation."""
        return self.flops_per_token * self.tokens_per_iteration

    @property
    def computed_flops_per_iteration(self) -> int:
        """The same with recomputation."""
        return self.computed_flops_per_token * self.tokens_per_iteration

    def seconds_per_iteration(self, tflops_per_device: float) -> float:
        """At a measured speed, as training logs it: recomputation not counted, waiting included."""
        return self.flops_per_iteration / (tflops_per_device * 1e12 * self.layout.devices)


def estimate(shape: Shape, layout: Layout) -> Estimate:
    """Everything about training this model this way."""
    return Estimate(
        shape=shape,
        layout=layout,
        parameters=count_parameters(shape),
        memory=tuple(device_memory(shape, layout, stage) for stage in range(layout.stages)),
        flops_per_token=flops_per_token(shape),
        computed_flops_per_token=flops_per_token(shape, is_recomputed=layout.segment_layers is not None),
        communication=communication_bytes(shape, layout),
        bubble=bubble_share(layout),
    )


# Parameters. Each tensor of the model is one entry; the counts and the operations both follow from these.


class Weights(NamedTuple):
    """One tensor of parameters.

    `numbers` of them; `is_split`: shared out over tensor-parallel ranks, in rows of `row` numbers;
    `multiplies`: every token is multiplied by it.
    """

    part: str
    numbers: int
    is_split: bool = False
    multiplies: bool = False
    row: int = 1


def count_parameters(shape: Shape) -> dict[str, int]:
    """Parameters by part, of the whole model; a tied head has none of its own."""
    counts = Counter(dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0))
    tensors = [*_embedding(shape), *_head(shape)]
    for kind in shape.owned_types:
        tensors += _layer(shape, kind)
    for tensor in tensors:
        counts[tensor.part] += tensor.numbers
    return dict(counts)


def _norm(shape: Shape, width: int) -> Weights:
    per_norm = {"layernorm": 2 * width, "apexlayernorm": 2 * width, "rmsnorm": width, "scalenorm": 1}
    return Weights("norms", per_norm[shape.norm])


def _linear(shape: Shape, part: str, inputs: int, outputs: int, *, is_column: bool) -> Iterator[Weights]:
    """A projection split by outputs (its bias too) or by inputs (its bias whole on every rank)."""
    yield Weights(part, inputs * outputs, is_split=True, multiplies=True)
    if shape.has_attention_bias if part == "attention" else shape.has_bias:
        yield Weights(part, outputs, is_split=is_column)


def _embedding(shape: Shape) -> Iterator[Weights]:
    yield Weights("embedding", shape.vocab_size * shape.hidden_size, is_split=True, row=shape.hidden_size)
    if shape.position == "learned":
        yield Weights("positions", shape.max_positions * shape.hidden_size)


def _head(shape: Shape) -> Iterator[Weights]:
    yield _norm(shape, shape.hidden_size)
    if not shape.is_tied:
        numbers = shape.vocab_size * shape.hidden_size
        yield Weights("head", numbers, is_split=True, multiplies=True, row=shape.hidden_size)


def _layer(shape: Shape, kind: str) -> Iterator[Weights]:
    if kind in ("gmlp", "amlp"):
        yield from _gmlp_layer(shape, kind)
        return
    width = shape.hidden_size
    yield _norm(shape, width)
    yield from _linear(shape, "attention", width, width + 2 * shape.key_width, is_column=True)
    yield from _linear(shape, "attention", width, width, is_column=False)
    if shape.position == "rpe":
        yield Weights("positions", shape.rpe_buckets * shape.heads, is_split=True)
    yield _norm(shape, width)
    for _ in range(2 if shape.is_gated else 1):
        yield from _linear(shape, "mlp", width, shape.intermediate_size, is_column=True)
    yield from _linear(shape, "mlp", shape.intermediate_size, width, is_column=False)


def _gmlp_layer(shape: Shape, kind: str) -> Iterator[Weights]:
    """norm, h to 8h, half of it normed and mixed over positions, 4h to h; amlp adds one head of attention."""
    width = shape.hidden_size
    yield _norm(shape, width)
    yield from _linear(shape, "mlp", width, 8 * width, is_column=True)
    yield _norm(shape, 4 * width)
    yield Weights("mlp", shape.seq_length**2 + shape.seq_length)
    yield from _linear(shape, "mlp", 4 * width, width, is_column=False)
    if kind == "amlp" and shape.gmlp_attention_width is not None:
        yield from _linear(shape, "attention", 8 * width, 3 * shape.gmlp_attention_width, is_column=False)
        yield from _linear(shape, "attention", shape.gmlp_attention_width, 4 * width, is_column=True)


# Operations.


def flops_per_token(shape: Shape, *, is_recomputed: bool = False) -> int:
    """Of forward and backward pass; recomputing the layers adds their forward pass once more.

    Source: arXiv:2104.04473, appendix: 72 (96) B s l h^2 (1 + s / 6h + V / 16lh), here for any layer.
    """
    kinds = Counter(shape.attention_types)
    layers = sum(number * _layer_flops(shape, kind) for kind, number in kinds.items())
    head = 2 * shape.vocab_size * shape.hidden_size
    return 3 * (layers + head) + (layers if is_recomputed else 0)


def _layer_flops(shape: Shape, kind: str) -> int:
    """Of one token's forward pass through one layer."""
    matrices = 2 * sum(tensor.numbers for tensor in _layer(shape, kind) if tensor.multiplies)
    if kind in ("gmlp", "amlp"):
        mixed = 8 * shape.seq_length * shape.hidden_size
        attended = (shape.gmlp_attention_width or 0) if kind == "amlp" else 0
        return matrices + mixed + 4 * shape.seq_length * attended
    return matrices + 4 * _keys_per_query(shape, kind) * shape.hidden_size


def _keys_per_query(shape: Shape, kind: str) -> int:
    """Keys that a query is multiplied with; causality halves none of them."""
    length, sparsity = shape.seq_length, shape.sparsity
    windows = length / (sparsity.block * sparsity.local_blocks)
    blocks = {
        "global": length / sparsity.block,
        "local": sparsity.local_attention_blocks // 2 + 1,
        "sparse_fixed": sparsity.local_blocks + windows * sparsity.global_blocks,
        "sparse_variable": sparsity.variable_window + sparsity.listed_global_blocks + sparsity.random_blocks,
        "bigbird": sparsity.sliding_blocks + sparsity.global_blocks + sparsity.random_blocks,
        "bslongformer": sparsity.sliding_blocks + sparsity.listed_global_blocks,
    }
    return min(length, round(blocks[kind] * sparsity.block))


# Memory.


def device_memory(shape: Shape, layout: Layout, stage: int = 0) -> Memory:
    """Bytes of one device of a pipeline stage, at the moment when it needs most.

    Source: arXiv:1910.02054, section 3 (16-bit weights and gradients, float32 master weights and moments) and
    section 5 (what each stage of ZeRO shares out).
    """
    local = local_parameters(shape, layout, stage)
    shared = ceil(local / layout.data_parallel)
    zero = layout.zero_stage
    weights = layout.element_bytes * (shared if zero >= 3 else local)
    gradients = layout.gradient_bytes * (shared if zero >= 2 else local)
    master = 4 if layout.element_bytes < 4 else 0
    optimizer = (master + 4 * layout.optimizer_states) * (shared if zero >= 1 else local)
    host = 0
    if layout.optimizer_on_host:
        host, optimizer = optimizer, 0
        if zero >= 2:
            host, gradients = host + gradients, 0
    if layout.parameters_on_host:
        host, weights = host + weights, 0
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=_stage_activations(shape, layout, stage),
        buffers=_buffers(shape, layout, local, stage),
        host=host + _inputs_on_host(shape, layout, stage),
    )


def activation_bytes_per_layer(shape: Shape, layout: Layout, kind: str = "global") -> int:
    """Bytes that one layer keeps of one micro-batch for the backward pass, on one device.

    For the plain transformer with dropout and scores of its own this is s b h (10 + 24 / t + 5 a s / (h t)).

    Source: arXiv:2205.05198, section 4; flash attention keeps one float32 number per query and head instead
    of scores.
    """
    size, width, ranks = layout.element_bytes, shape.hidden_size, layout.model_parallel
    dropped = width if shape.hidden_dropout > 0 else 0
    tokens = shape.seq_length * layout.micro_batch
    sharers = ranks if layout.splits_sequence else 1
    if kind in ("gmlp", "amlp"):
        # The norm's input and dropout's mask; `up`'s input; 8h before and after the activation, and of 4h v's
        # norm, mixed v, product.
        between = _kept_by_norm(shape, size, width) + dropped
        whole = size * width
        split = (2 * 8 * size * width + 12 * size * width) + _kept_by_norm(shape, size, 4 * width)
    else:
        between = 2 * _kept_by_norm(shape, size, width) + 2 * dropped
        whole = 2 * size * width
        split = _kept_by_attention(shape, size, kind) + _kept_by_mlp(shape, size)
    return tokens * (ceil(between / sharers) + whole + ceil(split / ranks))


def _kept_by_norm(shape: Shape, size: int, width: int) -> int:
    """Of one token: the input, or two float32 tensors where the norm is written out in torch."""
    return size * width if shape.norm.endswith("layernorm") else 8 * width


def _kept_by_mlp(shape: Shape, size: int) -> int:
    """Of one token: the projections' results, the activation's, and what `down` reads."""
    kept = _KEPT_BY_ACTIVATION.get(shape.activation, 1)
    tensors = kept + 3 if shape.is_gated else kept + 1
    return tensors * size * shape.intermediate_size


def _kept_by_attention(shape: Shape, size: int, kind: str) -> int:
    """Of one token: query, key, value, the context, and scores or flash attention's sums."""
    width, key_width = shape.hidden_size, shape.key_width
    kept = 2 * width + 2 * key_width
    if shape.position == "rotary" and not shape.keeps_scores:
        # Query and key are rotated into new tensors, while the value holds the memory of all three.
        kept += width + key_width
    elif width // shape.heads < key_width < width:
        # Queries that share a key are copied out from between the keys.
        kept += width
    if not shape.keeps_scores:
        return kept * size + 4 * shape.heads
    per_score = 2 * size + 1 if shape.attention_dropout > 0 else size
    return kept * size + per_score * shape.heads * _keys_per_query(shape, kind)


def _stage_activations(shape: Shape, layout: Layout, stage: int) -> int:
    """Of all micro-batches on their way (with 1F1B the first stage has most), and the peak of one of them."""
    kinds = _stage_types(shape, layout, stage)
    per_layer = {kind: activation_bytes_per_layer(shape, layout, kind) for kind in set(kinds)}
    working = 0
    kept = sum(per_layer[kind] for kind in kinds)
    if layout.segment_layers is not None:
        working = max((per_layer[kind] for kind in kinds), default=0) * min(layout.segment_layers, len(kinds))
        kept = 0 if layout.inputs_on_host else _segment_inputs(shape, layout, len(kinds))
    if stage == 0 and shape.hidden_dropout > 0:
        mask = shape.seq_length * layout.micro_batch * shape.hidden_size
        kept += ceil(mask / layout.model_parallel) if layout.splits_sequence else mask
    return kept * _in_flight(layout, stage) + max(working, _head_activations(shape, layout, stage))


def _segment_inputs(shape: Shape, layout: Layout, layers: int) -> int:
    assert layout.segment_layers is not None
    segments = ceil(layers / layout.segment_layers)
    if layout.splits_inputs:
        return segments * ceil(_hidden_bytes(shape, layout) / layout.model_parallel)
    return segments * _flowing_bytes(shape, layout)


def _inputs_on_host(shape: Shape, layout: Layout, stage: int) -> int:
    if layout.segment_layers is None or not layout.inputs_on_host:
        return 0
    layers = len(_stage_types(shape, layout, stage))
    return _segment_inputs(shape, layout, layers) * _in_flight(layout, stage)


def _head_activations(shape: Shape, layout: Layout, stage: int) -> int:
    """On the last stage: the norm's input and the projection's, and what the loss needs."""
    if stage != layout.stages - 1:
        return 0
    size, width = layout.element_bytes, shape.hidden_size
    tokens = shape.seq_length * layout.micro_batch
    kept_by_norm = tokens * _kept_by_norm(shape, size, width)
    if layout.splits_sequence:
        kept_by_norm = ceil(kept_by_norm / layout.model_parallel)
    loss = _loss_in_chunks if layout.has_loss_in_chunks else _loss_of_all_logits
    return kept_by_norm + size * tokens * width + loss(shape, layout, tokens)


def _loss_of_all_logits(shape: Shape, layout: Layout, tokens: int) -> int:
    """The logits and their gradient."""
    return 2 * layout.element_bytes * tokens * ceil(shape.vocab_size / layout.model_parallel)


def _loss_in_chunks(shape: Shape, layout: Layout, tokens: int) -> int:
    """Some tokens' logits, a part of them in float32, and the gradients of both factors.

    The output matrix's gradient is summed in float32; in a smaller type a chunk's product is there as well.
    """
    size, entries = layout.element_bytes, ceil(shape.vocab_size / layout.model_parallel)
    logits = min(tokens, max(1, CHUNK_NUMBERS // entries)) * entries
    matrix = (4 if size == 4 else 4 + size) * entries * shape.hidden_size
    return size * logits + 4 * min(logits, BLOCK_NUMBERS) + matrix + size * tokens * shape.hidden_size


def _in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches that a stage has forwarded and not yet taken back."""
    return min(layout.stages - stage, layout.accumulation)


def _hidden_bytes(shape: Shape, layout: Layout) -> int:
    """Hidden states of one micro-batch."""
    return layout.element_bytes * shape.seq_length * layout.micro_batch * shape.hidden_size


def _flowing_bytes(shape: Shape, layout: Layout) -> int:
    """What one rank has of them between two layers."""
    whole = _hidden_bytes(shape, layout)
    return ceil(whole / layout.model_parallel) if layout.splits_sequence else whole


def _buffers(shape: Shape, layout: Layout, local: int, stage: int) -> int:
    """DeepSpeed's gradient buckets, the parameters that ZeRO 3 gathers, what travels between stages."""
    total = RUNTIME_BYTES
    if layout.zero_stage == 0 and layout.data_parallel > 1:
        total += layout.reduced_bytes * min(local, layout.bucket)
    if layout.zero_stage >= 1:
        total += layout.element_bytes * layout.bucket * (2 if layout.has_second_bucket else 1)
    if layout.zero_stage == 3:
        total += layout.element_bytes * min(local, layout.live_parameters)
    if layout.stages > 1:
        # Per micro-batch on its way: the stage's result; in the backward pass also a gradient.
        total += _flowing_bytes(shape, layout) * (_in_flight(layout, stage) + 1)
    return total


def _stage_types(shape: Shape, layout: Layout, stage: int) -> tuple[str, ...]:
    """Attention types of the layers of a stage."""
    return tuple(shape.attention_types[layer] for layer in _stage_layers(shape, layout, stage))


def _stage_layers(shape: Shape, layout: Layout, stage: int) -> range:
    """The layers of a stage; the first stages take one more where it does not come out even."""
    each, rest = divmod(shape.num_layers, layout.stages)
    start = stage * each + min(stage, rest)
    return range(start, start + each + (stage < rest))


def local_parameters(shape: Shape, layout: Layout, stage: int) -> int:
    """Parameters of one device of a stage, before ZeRO shares any out."""
    kinds = Counter(shape.owned_within(_stage_layers(shape, layout, stage)))
    ranks = layout.model_parallel
    total = sum(number * _local_count(_layer(shape, kind), ranks) for kind, number in kinds.items())
    if stage == 0:
        total += _local_count(_embedding(shape), ranks)
    if stage == layout.stages - 1:
        total += _local_count(_head(shape), ranks)
        if shape.is_tied and layout.stages > 1:
            total += ceil(shape.vocab_size / ranks) * shape.hidden_size
    return total


def _local_count(tensors: Iterator[Weights], ranks: int) -> int:
    return sum(
        ceil(tensor.numbers // tensor.row / ranks) * tensor.row if tensor.is_split else tensor.numbers
        for tensor in tensors
    )


# Communication and waiting.


def communication_bytes(shape: Shape, layout: Layout) -> Communication:
    """Bytes that the busiest device sends for one update.

    Source: arXiv:1910.02054, section 7 (data parallel), arXiv:1909.08053, section 3 (two all-reduces per
    layer and pass), arXiv:2104.04473, section 4.1 (pipeline).
    """
    return Communication(
        data=_data_bytes(shape, layout), model=_model_bytes(shape, layout), pipe=_pipe_bytes(shape, layout)
    )


def _data_bytes(shape: Shape, layout: Layout) -> int:
    local = max(local_parameters(shape, layout, stage) for stage in {0, layout.stages - 1})
    gathered, reduced = layout.element_bytes * local, layout.reduced_bytes * local
    # Stages 2 and 3 reduce after every micro-batch, stage 3 also gathers the weights twice for each.
    passes = {
        0: 2 * reduced,
        1: reduced + gathered,
        2: layout.accumulation * reduced + gathered,
        3: layout.accumulation * (reduced + 2 * gathered),
    }
    return _ring(passes[layout.zero_stage], layout.data_parallel)


def _model_bytes(shape: Shape, layout: Layout) -> int:
    layers = ceil(shape.num_layers / layout.stages)
    passes = 3 if layout.segment_layers is not None else 2
    # Two per layer and pass; the embedding's forward and the head's backward pass have one each.
    all_reduces = 2 * layers * passes + (2 if layout.stages == 1 else 1)
    each = 2 * _hidden_bytes(shape, layout)
    return layout.accumulation * all_reduces * _ring(each, layout.model_parallel)


def _pipe_bytes(shape: Shape, layout: Layout) -> int:
    if layout.stages == 1:
        return 0
    directions = 2 if layout.stages > 2 else 1
    sent = layout.accumulation * directions * _flowing_bytes(shape, layout)
    tied = ceil(shape.vocab_size / layout.model_parallel) * shape.hidden_size if shape.is_tied else 0
    return sent + layout.reduced_bytes * tied


def _ring(sent: int, ranks: int) -> int:
    """Bytes that each rank sends in a reduce-scatter or all-gather of `sent` bytes."""
    return sent * (ranks - 1) // ranks


def bubble_share(layout: Layout) -> float:
    """Part of an update's time in which a stage has nothing to do.

    Source: arXiv:2104.04473, section 2.2: (p - 1) / m of the busy time, here of the whole.
    """
    return (layout.stages - 1) / (layout.accumulation + layout.stages - 1)
