"""Memory estimate: tensors that are stored for the backward pass; allocator overhead is not included.

Known limit: without the fused softmax kernels, the attention scores need slightly more memory.

On GPUs, layers are assumed to be compiled unless the configuration rules it out: what is elementwise is then
computed again in the backward pass instead of stored.

Sources: arXiv:2205.05198 (activations, for the operators in use), arXiv:1910.02054 (ZeRO).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from neox_config.estimate.mixers import costs_of, kept_by_norm
from neox_config.estimate.parameters import (
    bucketed_parameters,
    divided_parameters,
    largest_block,
    largest_tensor,
    local_parameters,
    local_state_values,
    number_of_each,
    outside_blocks,
    replica_values,
    stage_layers,
    trained_parameters,
)
from neox_config.estimate.setup import Setup, Teacher
from neox_config.facts.collectives import EARLY_ELEMENTS
from neox_config.facts.loss import BLOCK_NUMBERS, CHUNK_NUMBERS
from neox_config.facts.pipeline_schedules import most_passes_in_flight
from neox_config.spec.model import Layer, Retrieval

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


def device_memory(setup: Setup, stage: int = 0, *, device: str = "cuda") -> Memory:
    """Return the peak memory of one device of a pipeline stage.

    `benchmarks/memory.py` compares it with the tensors of real processes.

    Args:
        setup: what is estimated.
        stage: the pipeline stage.
        device: type of the devices (cuda, cpu), on which the memory of the runtime, stored activations, the
            chunks of the loss and the messages of gradients depend.
    """
    if setup.run.engine.name == "torch" and setup.run.layout.data == 1:
        # There is nothing to partition.
        is_compiled = setup.compiles_on(device)
        setup = setup.changed(layout={"zero": 0}, compilation={"requested": is_compiled})
    activations = _stage_activations(setup, stage, device)
    weights_of_teacher = 0
    if setup.teacher is not None:
        whole = replace(setup, model=setup.teacher.model, entries=setup.teacher.entries)
        weights_of_teacher = setup.element_bytes * local_parameters(whole, stage)
    if setup.is_sharded_by_torch:
        weights, gradients, optimizer = _sharded_states(setup, stage)
        host = 0
    else:
        weights, gradients, optimizer, host = _states(setup, stage)
    reused = _reused(setup, stage, gradients, activations)
    return Memory(
        weights=weights + weights_of_teacher,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations.at_start,
        buffers=_buffers(setup, stage, activations.at_start - reused, device),
        host=host + _inputs_on_host(setup, stage),
        snapshot=_snapshot(setup, stage),
        reused=reused,
    )


def _reused(setup: Setup, stage: int, gradients: int, activations: _Activations) -> int:
    """Return the bytes of gradients that take the place of activations.

    With one micro-batch per update there are no gradients before its backward pass, which frees a layer's
    activations as it computes the gradients of its weights: the peak is at its beginning or at its end. A sum
    for the noise scale, and DeepSpeed's buffers, are there all the time.
    """
    if setup.run.batch.accumulation > 1 or (
        setup.run.engine.name == "deepspeed" and setup.run.layout.zero > 0
    ):
        return 0
    kept = divided_parameters if setup.is_sharded_by_torch else trained_parameters
    lasting = (setup.gradient_bytes - setup.accumulated_bytes) * kept(setup, stage)
    return max(0, min(gradients - lasting, activations.at_start - activations.at_end))


def _sharded_states(setup: Setup, stage: int) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer with `fully_shard`.

    A rank's parts of the weights are float32, and are counted with the states. Whole weights exist besides:
    all of them at stages 1 and 2; at stage 3 those of a layer, and what is outside the layers.
    """
    local, trained = local_parameters(setup, stage), trained_parameters(setup, stage)
    part, size = divided_parameters(setup, stage), setup.element_bytes
    weights = size * local
    if setup.run.layout.zero == 3:
        gathered = largest_block(setup, stage) + outside_blocks(setup, stage)
        weights = size * (min(local, gathered) + ceil((local - trained) / setup.run.layout.data))
    summed = 4 * part if setup.reduces_every_time else setup.accumulated_bytes * trained
    of_noise_scale = setup.gradient_bytes - setup.accumulated_bytes
    states = local_state_values(setup, stage, row_ranks=setup.run.layout.data)
    kept = 4 * part * (2 if setup.averages_weights else 1)
    return weights, summed + of_noise_scale * part, kept + setup.state_bytes * states


def _states(setup: Setup, stage: int) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients and optimizer without `fully_shard`, and those on the host.

    Source: arXiv:1910.02054, section 3 (16-bit weights and gradients, float32 master weights and moments) and
    section 5 (partitioning of each stage of ZeRO).
    """
    local = local_parameters(setup, stage)
    zero = setup.run.layout.zero
    weights = setup.element_bytes * (ceil(local / setup.run.layout.data) if zero >= 3 else local)
    # Weights that are not trained have neither gradients nor states.
    trained = trained_parameters(setup, stage)
    shared = ceil(trained / setup.run.layout.data)
    gradients = setup.gradient_bytes * (shared if zero >= 2 else trained)
    master = 4 if setup.element_bytes < 4 else 0
    # ZeRO accepts only optimizers with the same states for every element.
    values = setup.states * shared if zero >= 1 else local_state_values(setup, stage)
    kept = master + (_FLOAT32 if setup.averages_weights else 0)
    optimizer = kept * (shared if zero >= 1 else trained) + setup.state_bytes * values
    host = 0
    if setup.on_host:
        host, optimizer = optimizer, 0
        if zero >= 2:
            host, gradients = host + gradients, 0
    if setup.weights_on_host:
        host, weights = host + weights, 0
    return weights, gradients, optimizer, host


def _snapshot(setup: Setup, stage: int) -> int:
    """Return the mean size of a rank's shard: the data-parallel ranks divide the float32 weights and states.

    Without ZeRO they divide whole tensors, so that some ranks need more than the mean. Of divided experts the
    ranks that have the same ones divide these, which gives the same mean.
    """
    if not setup.saves_in_background:
        return 0
    setup = setup.changed(layout={"experts": 1})
    local, of_replica = trained_parameters(setup, stage), 0
    if not setup.saves_states:
        values = 0
    else:
        # Every replica writes the states that only it has.
        of_replica = replica_values(setup, stage)
        values = local_state_values(setup, stage) - of_replica
    numbers = local * (2 if setup.averages_weights else 1) + ceil(values * setup.state_bytes / _FLOAT32)
    return 4 * (ceil(numbers / setup.run.layout.data) + of_replica)


def activation_bytes_per_layer(setup: Setup, layer: Layer, *, device: str = "cuda") -> int:
    """Return the bytes that one layer stores per micro-batch for the backward pass, on one device of a type.

    For a standard transformer with dropout and materialized scores: s b h (10 + 24 / t + 5 a s / (h t)).

    Source: arXiv:2205.05198, section 4; flash attention stores one float32 number per query and head instead
    of scores.
    """
    size, width, ranks = setup.element_bytes, setup.model.width, setup.run.layout.tensor
    dropped = width if setup.run.dropout.hidden > 0 else 0
    sharers = ranks if setup.run.layout.splits_sequence else 1
    is_compiled, costs = setup.compiles_on(device), costs_of(layer)
    norm = kept_by_norm(layer.norm, width, size, device, is_compiled=is_compiled)
    # For each mixer: the norm's input and dropout's mask; the input of its first matrix; what is in it.
    between, whole = sum(layer.norms) * norm + len(costs) * dropped, len(costs) * size * width
    if layer.shares_norm:
        # So are the inputs of both matrices.
        whole = size * width
    elif len(costs) > 1 and layer.residual == "parallel" and norm == size * width:
        # Both norms store the same input.
        between -= norm
    split = sum(cost.kept(each, layer, setup, is_compiled, device) for each, cost in costs)
    if not setup.run.recomputation.attention:
        split += _scores(setup, layer)
    if setup.gathers_again:
        # The inputs of split matrices are gathered again for the backward pass.
        between, whole = between + whole, 0
    return _tokens(setup) * (ceil(between / sharers) + whole + ceil(split / ranks))


def _scores(setup: Setup, layer: Layer) -> int:
    """Return the bytes per token of attention scores, or of what is stored instead of them."""
    return sum(cost.scores(each, setup) for each, cost in costs_of(layer) if cost.scores is not None)


def _stage_activations(setup: Setup, stage: int, device: str) -> _Activations:
    """Return the activations of all micro-batches in flight, plus the peak of a single one."""
    recomputation, kinds = setup.run.recomputation, _of_stage(setup, stage)
    per_layer = [activation_bytes_per_layer(setup, kind, device=device) for kind, _ in kinds]
    layer, working, layers = max(per_layer, default=0), 0, sum(number for _, number in kinds)
    kept = sum(number * each for (_, number), each in zip(kinds, per_layer, strict=True))
    if recomputation.segment is not None:
        # Layers of one tower are recomputed at a time.
        working = ceil(layer * min(recomputation.segment, layers) / setup.model.towers)
        layer, kept = 0, 0 if recomputation.inputs_on_host else _segment_inputs(setup, layers)
    elif recomputation.attention:
        scores = (ceil(_scores(setup, kind) / setup.run.layout.tensor) for kind, _ in kinds)
        working = _tokens(setup) * max(scores, default=0)
    if stage == 0 and setup.run.dropout.hidden > 0:
        mask = _tokens(setup) * setup.model.width
        kept += ceil(mask / setup.run.layout.tensor) if setup.run.layout.splits_sequence else mask
    single = max(working, _head_activations(setup, stage, device))
    return _Activations(at_start=kept * _in_flight(setup, stage) + single, at_end=layer + working)


def _of_stage(setup: Setup, stage: int) -> Sequence[tuple[Layer, int]]:
    """Return the different layers of a stage, each with how often it occurs."""
    return number_of_each(setup.model, stage_layers(setup.model, setup.run.layout.stages, stage))


def _segment_inputs(setup: Setup, layers: int) -> int:
    segments = ceil(layers / (setup.run.recomputation.segment or layers))
    if setup.run.recomputation.partitions_inputs:
        return segments * ceil(hidden_bytes(setup) / setup.run.layout.tensor)
    return segments * flowing_bytes(setup)


def _inputs_on_host(setup: Setup, stage: int) -> int:
    if setup.run.recomputation.segment is None or not setup.run.recomputation.inputs_on_host:
        return 0
    layers = len(stage_layers(setup.model, setup.run.layout.stages, stage))
    return _segment_inputs(setup, layers) * _in_flight(setup, stage)


def _head_activations(setup: Setup, stage: int, device: str) -> int:
    """Return the activations of the head on the last stage: inputs of norm and projection, and the loss."""
    layout, size, width = setup.run.layout, setup.element_bytes, setup.model.width
    if stage != layout.stages - 1:
        return 0
    tokens = _tokens(setup)
    # It is outside the layers, and is not compiled.
    of_norm = tokens * kept_by_norm(setup.model.norm, width, size, device, is_compiled=False)
    if setup.run.layout.splits_sequence:
        of_norm = ceil(of_norm / layout.tensor)
    if isinstance(setup.model.head, Retrieval):
        # Only the first token of each text is projected.
        return of_norm
    loss = _loss_in_chunks if setup.has_loss_in_chunks else _loss_of_all_logits
    of_loss = loss(setup, tokens, device)
    if setup.model.head.softcap is not None:
        # Hyperbolic tangents, and the logits after the limit, in float32.
        columns = ceil(setup.entries / layout.tensor)
        rows = max(1, CHUNK_NUMBERS[device] // columns) if setup.has_loss_in_chunks else tokens
        of_loss += 2 * _FLOAT32 * min(rows, tokens) * columns
    if setup.teacher is not None:
        of_loss = _loss_with_teacher(setup, setup.teacher, tokens, of_loss)
    return of_norm + size * tokens * width + of_loss


def _loss_with_teacher(setup: Setup, teacher: Teacher, tokens: int, alone: int) -> int:
    """Return the bytes of the loss of a student: the hidden states of its teacher, and what both logits take.

    The divergence of logits has five float32 tensors besides the logits of both: what the cross entropy
    keeps, and four of the whole vocabulary, which tensor-parallel ranks gather. The layers of the teacher run
    before it, one at a time, and keep nothing.
    """
    size, width, ranks = setup.element_bytes, teacher.model.width, setup.run.layout.tensor
    hidden = teacher.compared_layers * size * tokens * width
    channels = (each.channel for each in teacher.model.layers if each.channel is not None)
    projected = max(((3 if each.is_gated else 2) * each.width for each in channels), default=0)
    layer = size * tokens * (3 * width + ceil(projected / ranks))
    if not teacher.compares_logits:
        return max(alone, layer + hidden)
    entries = tokens * teacher.entries
    logits = (2 * size + _FLOAT32) * ceil(entries / ranks) + 4 * _FLOAT32 * entries
    gathered = 2 * size * entries if ranks > 1 else 0
    return max(logits + gathered, layer) + hidden


def _loss_of_all_logits(setup: Setup, tokens: int, device: str) -> int:
    """Return the bytes of the logits and their gradient."""
    return 2 * setup.element_bytes * tokens * ceil(setup.entries / setup.run.layout.tensor)


def _loss_in_chunks(setup: Setup, tokens: int, device: str) -> int:
    """Return the bytes of the logits of two chunks, or of one partly in float32, and of both gradients.

    A chunk's logits are freed when those of the next are computed. The gradient of the matrix is summed in
    float32. With a smaller data type, that of weights, it is cast after the last chunk; the product of a
    chunk is stored as well, except on a GPU, which adds it in the same kernel.
    """
    size, entries = setup.element_bytes, ceil(setup.entries / setup.run.layout.tensor)
    rows = min(tokens, max(1, CHUNK_NUMBERS[device] // entries))
    logits, following = rows * entries, min(rows, tokens - rows) * entries
    elements = entries * setup.model.width
    working = size * (logits + following)
    if size < _FLOAT32:
        block = _FLOAT32 * min(logits, BLOCK_NUMBERS[device])
        product = size * elements if device == "cpu" else 0
        working = max(working, size * logits + max(block, product), size * elements)
    return working + _FLOAT32 * elements + size * tokens * setup.model.width


def _in_flight(setup: Setup, stage: int) -> int:
    """Return the number of micro-batches of a stage between their forward and backward pass."""
    layout = setup.run.layout
    passes = most_passes_in_flight(
        layout.schedule,
        stage=stage,
        stages=layout.stages,
        chunks=layout.chunks,
        micro_batches=setup.run.batch.accumulation,
    )
    return ceil(passes / layout.chunks)


def _tokens(setup: Setup) -> int:
    """Return the tokens of a micro-batch."""
    return setup.model.texts * setup.run.batch.length * setup.run.batch.micro


def hidden_bytes(setup: Setup) -> int:
    """Return the bytes of the hidden states of one micro-batch."""
    return setup.element_bytes * _tokens(setup) * setup.model.width


def flowing_bytes(setup: Setup) -> int:
    """Return the bytes of the hidden states that one rank holds between two layers."""
    whole = hidden_bytes(setup)
    return ceil(whole / setup.run.layout.tensor) if setup.run.layout.splits_sequence else whole


def _buffers(setup: Setup, stage: int, freed: int, device: str) -> int:
    """Return the bytes of gradient buckets, parameters gathered by ZeRO 3, pipelines, and the runtime.

    What exists when the activations are freed is counted as far as it exceeds the bytes freed.
    """
    total, local = _RUNTIME_BYTES[device], local_parameters(setup, stage)
    trained = trained_parameters(setup, stage)
    if setup.reduces_early(device):
        total += setup.reduced_bytes * min(trained, EARLY_ELEMENTS)
    elif setup.run.layout.zero == 0 and setup.run.layout.data > 1:
        bucket = max(bucketed_parameters(setup, device=device), default=0)
        total += max(0, setup.reduced_bytes * min(trained, bucket) - freed)
    if setup.optimizer.replica_states and setup.run.layout.data > 1:
        at_once = max(_AVERAGED_ELEMENTS, largest_tensor(setup, stage))
        total += _AVERAGED_BYTES * min(trained, at_once)
    if setup.run.precision.autocast:
        # A forward pass casts each weight once, and the backward pass of the same micro-batch uses the copy.
        # Recomputed segments do not keep it.
        kept = 1 if setup.run.recomputation.segment is not None else _in_flight(setup, stage)
        total += _CAST_BYTES * local * kept
    if setup.is_sharded_by_torch:
        total += _gathered(setup, stage, freed, device)
    elif setup.run.layout.zero >= 1 and setup.run.engine.name == "deepspeed":
        total += setup.element_bytes * setup.bucket * (2 if setup.has_second_bucket else 1)
        if setup.run.layout.zero == 3:
            total += setup.element_bytes * min(local, setup.live_parameters)
    if setup.run.layout.stages > 1:
        # The output of the stage per micro-batch in flight, plus a gradient in the backward pass.
        total += flowing_bytes(setup) * (_in_flight(setup, stage) + 1)
    return total


def _gathered(setup: Setup, stage: int, freed: int, device: str) -> int:
    """Return the bytes that `fully_shard` needs in the backward pass beyond states and activations.

    A layer has whole gradients, and a flat copy of them while they are reduced; its activations are freed
    then. What is outside the layers has gradients from the loss on, which are reduced when all activations
    are freed.
    """
    size, layer = setup.element_bytes, largest_block(setup, stage)
    outside = outside_blocks(setup, stage)
    if not setup.reduces_every_time:
        return 0
    both = size + setup.reduced_bytes
    kinds = (kind for kind, _ in _of_stage(setup, stage))
    of_layer = max((activation_bytes_per_layer(setup, kind, device=device) for kind in kinds), default=0)
    in_layers = size * outside + max(0, both * layer - of_layer)
    at_end = both * outside + 4 * ceil(outside / setup.run.layout.data) - freed
    return max(in_layers, at_end)
