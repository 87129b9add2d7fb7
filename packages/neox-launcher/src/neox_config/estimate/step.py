"""Collectives of one training step: calls and bytes of each device, by part of the step and operation.

The counts are those of the model's own communication, of the update at ZeRO stage 0, and of optimizers that
join parts of weights; a test compares them with what real processes call. The bytes are those of the
messages: of all_gather the output, of reduce_scatter and all_to_all the input.

Sources: arXiv:1909.08053, section 3 (tensor parallelism), arXiv:2205.05198, section 4.2.2 (of the sequence).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from neox_config.errors import ConfigError
from neox_config.estimate.memory import hidden_bytes
from neox_config.estimate.parameters import (
    bucketed_parameters,
    each_tensor,
    is_matrix_of_layer,
    stage_layers,
    stage_types,
)
from neox_config.estimate.shapes import Layout, Shape
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.collectives import BUS_SHARE
from neox_config.facts.loss import CHUNK_NUMBERS
from neox_config.facts.norms import NORM_FACTS
from neox_config.facts.optimizers import JoinedParts

__all__ = [
    "Collective",
    "model_bytes",
    "not_counted",
    "optimizer_bytes",
    "refuse_unknown",
    "step_collectives",
]

_REDUCE, _GATHER, _SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
_EXCHANGE = "all_to_all_single"
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Calls of one operation in one part of a step.

    Args:
        part: part of the step.
        operation: name in torch.distributed.
        group: "model" or "data".
        calls: per update.
        bytes: of the messages of all calls together.
    """

    part: str
    operation: str
    group: str
    calls: int
    bytes: int


def refuse_unknown(shape: Shape, layout: Layout) -> None:
    """Raise an error if the collectives of a training are not known.

    Raises:
        ConfigError: it is a pipeline, trains adapters, or has compressed matrices, towers or layers that drop
            tokens.
    """
    unknown = {
        "pipelines (pipe-parallel-size)": layout.stages > 1,
        "low-rank adapters (lora-rank)": shape.adapter_rank > 0,
        "layers that drop tokens (random_ltd)": shape.drops_tokens,
        "compressed matrices (compression_training)": shape.is_compressed,
        "two towers (objective: ict)": shape.embedding_size is not None,
    }
    names = [name for name, is_used in unknown.items() if is_used]
    if names:
        raise ConfigError(
            f"--step does not count the collectives of {' and '.join(names)}; remove the setting, or leave "
            "out --step"
        )


def not_counted(layout: Layout) -> str | None:
    """Return what communicates over the data-parallel ranks in a way that is not counted; None if nothing."""
    if layout.data_parallel == 1 and layout.zero_stage == 0:
        return None
    if layout.zero_stage > 0:
        return f"what the engine sends at ZeRO stage {layout.zero_stage}: gradients, weights and norms"
    return "the optimizer's averages over data-parallel ranks" if layout.has_replica_states else None


def model_bytes(shape: Shape, layout: Layout) -> int:
    """Return the bytes that the busiest device sends over its tensor-parallel ranks per update, in rings."""
    if layout.model_parallel == 1:
        return 0
    return max(
        sum(_sent(each, layout.model_parallel) for each in _of_model(shape, layout, "cuda", stage))
        + optimizer_bytes(shape, layout, stage, "model")
        for stage in {0, layout.stages - 1}
    )


def optimizer_bytes(shape: Shape, layout: Layout, stage: int, group: str) -> int:
    """Return the bytes that a device of a stage sends over a group for what its optimizer joins, in rings."""
    size = layout.model_parallel if group == "model" else layout.data_parallel
    joined = _of_optimizer(shape, layout, stage)
    return sum(_sent(each, size) for each in joined if each.group == group)


def _sent(collective: Collective, size: int) -> int:
    return round(collective.bytes * BUS_SHARE[collective.operation](size))


def step_collectives(shape: Shape, layout: Layout, *, device: str = "cuda") -> tuple[Collective, ...]:
    """Return the collectives of one update, without those of hooks such as logging and saving.

    Args:
        shape: the model.
        layout: how it is run.
        device: type of the devices, on which the chunks of the loss and the messages of gradients depend.
    """
    rows = list(_of_model(shape, layout, device, 0)) if layout.model_parallel > 1 else []
    rows += [*_of_optimizer(shape, layout, 0), *_of_data(shape, layout, device)]
    return tuple(_merged(rows))


def _merged(rows: list[Collective]) -> Iterator[Collective]:
    """Yield one row per part, operation and group, in the order of the first."""
    merged: dict[tuple[str, str, str], Collective] = {}
    for row in rows:
        key = row.part, row.operation, row.group
        known = merged.get(key)
        merged[key] = (
            row
            if known is None
            else replace(known, calls=known.calls + row.calls, bytes=known.bytes + row.bytes)
        )
    return iter(merged.values())


@dataclass(frozen=True, slots=True)
class _Message:
    operation: str
    bytes: int


def _of_model(shape: Shape, layout: Layout, device: str, stage: int) -> Iterator[Collective]:
    """Yield the collectives over tensor-parallel ranks of a pipeline stage."""
    is_first, is_last = stage == 0, stage == layout.stages - 1
    micro_batch = [
        *(("embedding", message) for message in _embedding(shape, layout) if is_first),
        *_layers(shape, layout, stage_types(shape, layout, stage)),
        *(("head and loss", message) for message in _head(shape, layout, device) if is_last),
    ]
    partial, once = _partial(shape, layout, stage), list[_Message]()
    if layout.zero_stage > 0 and layout.engine == "deepspeed":
        # It reduces gradients in every backward pass, so that each is summed there.
        size = layout.element_bytes
        micro_batch += [("replicated parameters", _Message(_REDUCE, size * each)) for each in partial]
    elif partial:
        once.append(_Message(_REDUCE, _partial_bytes(partial, layout)))
    for part, message in micro_batch:
        yield _collective(part, message, "model", layout.accumulation)
    if layout.zero_stage == 0:
        # The norm of the gradients.
        once.append(_Message(_REDUCE, _FLOAT32))
    for message in once:
        yield _collective("update", message, "model")


def _partial_bytes(partial: list[int], layout: Layout) -> int:
    """Return the bytes of the message that sums partial gradients once per update."""
    if layout.zero_stage > 0 and layout.data_parallel > 1:
        # Each data-parallel rank has a part of them.
        return _FLOAT32 * sum(ceil(each / layout.data_parallel) for each in partial)
    return layout.accumulated_bytes * sum(partial)


def _collective(part: str, message: _Message, group: str, calls: int = 1) -> Collective:
    return Collective(
        part=part, operation=message.operation, group=group, calls=calls, bytes=calls * message.bytes
    )


def _embedding(shape: Shape, layout: Layout) -> Iterator[_Message]:
    whole = hidden_bytes(shape, layout)
    if layout.splits_sequence:
        yield from (_Message(_SCATTER, whole), _Message(_GATHER, whole))
    else:
        yield _Message(_REDUCE, whole)


def _head(shape: Shape, layout: Layout, device: str) -> Iterator[_Message]:
    """Yield the messages of the head, whose input is gathered or its gradient summed, and of the loss."""
    whole = hidden_bytes(shape, layout)
    if layout.splits_sequence:
        yield from (_Message(_GATHER, whole), _Message(_SCATTER, whole))
    else:
        yield _Message(_REDUCE, whole)
    tokens = shape.seq_length * layout.micro_batch
    columns = ceil(shape.vocab_size / layout.model_parallel)
    chunk = max(1, CHUNK_NUMBERS[device] // columns) if layout.has_loss_in_chunks else tokens
    for first in range(0, tokens, chunk):
        # Two numbers per token, of each rank.
        sent = 2 * _FLOAT32 * min(chunk, tokens - first) * layout.model_parallel
        yield _Message(_GATHER, sent)


def _layers(shape: Shape, layout: Layout, kinds: tuple[str, ...]) -> Iterator[tuple[str, _Message]]:
    for kind in kinds:
        forward, backward = _layer(shape, layout, kind)
        yield from (("layers, forward", message) for message in forward)
        yield from (("layers, backward", message) for message in backward)
    if layout.segment_layers is None:
        return
    for first in range(0, len(kinds), layout.segment_layers):
        segment = kinds[first : first + layout.segment_layers]
        again = [message for kind in segment for message in _layer(shape, layout, kind)[0]]
        # The output of the segment is not needed, so that its last sum is left out, unless dropout follows.
        again = again if shape.hidden_dropout > 0 else again[:-1]
        yield from (("layers, recomputed", message) for message in again)
        if layout.splits_inputs and not layout.splits_sequence:
            yield "layers, recomputed", _Message(_GATHER, _padded(hidden_bytes(shape, layout), layout))


def _padded(whole: int, layout: Layout) -> int:
    """Return the bytes of hidden states that are divided into equal parts."""
    size, ranks = layout.element_bytes, layout.model_parallel
    return ceil(whole // size / ranks) * ranks * size


def _layer(shape: Shape, layout: Layout, kind: str) -> tuple[list[_Message], list[_Message]]:
    """Return the messages of one layer in its forward and backward pass, in the forward pass in order."""
    if ATTENTION_FACTS[kind].is_gmlp:
        return _gmlp_layer(shape, layout, kind)
    whole = hidden_bytes(shape, layout)
    product = _product_bytes(whole, layout)
    sums = [product] if _sums_once(shape) else [product, product]
    if not layout.splits_sequence:
        entries = [whole] if _enters_once(shape) else [whole, whole]
        return [_Message(_REDUCE, each) for each in sums], [_Message(_REDUCE, each) for each in entries]
    # With a parallel residual, both branches enter in one message.
    entries = [2 * whole] if _enters_once(shape) else [whole, whole]
    enter, leave = ([_Message(kind, each) for each in entries] for kind in (_GATHER, _SCATTER))
    forward = [*enter, *(_Message(_SCATTER, each) for each in sums)]
    again = [_Message(_GATHER, _product_bytes(each, layout)) for each in entries]
    again = again if layout.gathers_again else []
    return forward, [*(_Message(_GATHER, each) for each in sums), *again, *leave]


def _product_bytes(whole: int, layout: Layout) -> int:
    """Return the bytes of factors and results of matrix products, which amp computes in 16 bit."""
    return whole // 2 if layout.autocasts else whole


def _enters_once(shape: Shape) -> bool:
    """Return True if both branches of a layer enter the split together; layers with adapters do not."""
    return shape.parallel_residual and shape.adapter_rank == 0


def _sums_once(shape: Shape) -> bool:
    """Return True if the outputs of both branches are summed over the ranks together."""
    return _enters_once(shape) and shape.hidden_dropout == 0.0


def _gmlp_layer(shape: Shape, layout: Layout, kind: str) -> tuple[list[_Message], list[_Message]]:
    """Return the messages of a gMLP layer, which also gathers the channels that its inner norm needs."""
    whole = hidden_bytes(shape, layout)
    product = _product_bytes(whole, layout)
    channels = _Message(_GATHER, 4 * product)
    inner_forward, inner_backward = [channels], [channels]
    width = shape.gmlp_attention_width
    if ATTENTION_FACTS[kind].has_inner_attention and width is not None:
        tokens = product // shape.hidden_size
        inner_forward += [_Message(_REDUCE, 3 * width * tokens)] * 2
        inner_backward.append(_Message(_REDUCE, width * tokens))
    if not layout.splits_sequence:
        return [*inner_forward, _Message(_REDUCE, product)], [*inner_backward, _Message(_REDUCE, whole)]
    leave = _Message(_GATHER, product)
    again = [leave] if layout.gathers_again else []
    forward = [_Message(_GATHER, whole), *inner_forward, _Message(_SCATTER, product)]
    return forward, [leave, *inner_backward, *again, _Message(_SCATTER, whole)]


def _partial(shape: Shape, layout: Layout, stage: int) -> list[int]:
    """Return the number of elements of each parameter of which every rank computes a part of the gradient."""
    found: list[int] = []
    for kind in shape.owned_within(stage_layers(shape, layout, stage)):
        is_gmlp = ATTENTION_FACTS[kind].is_gmlp
        if layout.splits_sequence or (_enters_once(shape) and not is_gmlp):
            found += _norm(shape) * (1 if is_gmlp else 2)
        if is_gmlp:
            found += [shape.seq_length**2, shape.seq_length]
        if layout.splits_sequence:
            biases = (shape.has_bias,) if is_gmlp else (shape.has_attention_bias, shape.has_bias)
            found += [shape.hidden_size] * sum(biases)
    if layout.splits_sequence and stage == layout.stages - 1:
        found += _norm(shape)
    if layout.splits_sequence and stage == 0 and shape.position == "learned":
        found.append(shape.max_positions * shape.hidden_size)
    return found


def _norm(shape: Shape) -> list[int]:
    """Return the number of elements of each parameter of a norm."""
    weight = NORM_FACTS[shape.norm].num_weights(shape.hidden_size, with_bias=False)
    both = NORM_FACTS[shape.norm].num_weights(shape.hidden_size, with_bias=shape.has_norm_bias)
    return [weight] if both == weight else [weight, both - weight]


def _of_data(shape: Shape, layout: Layout, device: str) -> Iterator[Collective]:
    """Yield the collectives over data-parallel ranks: gradients, the loss, and the number of its tokens."""
    if layout.data_parallel == 1:
        return
    if layout.zero_stage == 0 and not layout.has_replica_states:
        later = sum(_partial(shape, layout, 0)) if layout.model_parallel > 1 else 0
        for elements in bucketed_parameters(shape, layout, later=later, device=device):
            yield _collective("update", _Message(_REDUCE, layout.reduced_bytes * elements), "data")
    scalars = 2 if layout.weighs_globally else 1
    yield _collective("head and loss", _Message(_REDUCE, _FLOAT32), "data", scalars)


def _of_optimizer(shape: Shape, layout: Layout, stage: int) -> Iterator[Collective]:
    """Yield the collectives of an optimizer that joins what it computes of the parts of weights."""
    if layout.joins_rows is None:
        return
    of_model, of_rows = _JOINED[layout.joins_rows](shape, layout, stage)
    if layout.row_ranks > 1:
        yield from (_collective("update", message, "data") for message in of_rows)
    if layout.model_parallel > 1:
        yield from (_collective("update", message, "model") for message in of_model)


# Messages over tensor-parallel ranks, and over those that divide rows.
_Joined = tuple[list[_Message], list[_Message]]


def _matrices(shape: Shape, layout: Layout, stage: int) -> _Joined:
    """Return the messages of momenta that are made orthogonal, one matrix at a time on each rank.

    Ranks that divide rows send theirs to the rank that has the matrix, and get rows of the result back. The
    first rank has the largest of each turn.
    """
    ranks, size = layout.row_ranks, layout.element_bytes
    matrices = [each for each in each_tensor(shape, layout, stage) if is_matrix_of_layer(each)]
    matrices.sort(key=lambda tensor: tensor.numbers, reverse=True)
    of_model = [_Message(_GATHER, size * each.numbers) for each in matrices[::ranks]]
    of_rows = list[_Message]()
    for start in range(0, len(matrices), ranks):
        parts = [each.local_shape(layout.model_parallel) for each in matrices[start : start + ranks]]
        there = sum(ceil(rows / ranks) * (columns or 1) for rows, columns in parts)
        back = parts[0][0] * (parts[0][1] or 1)
        of_rows += [_Message(_EXCHANGE, size * there), _Message(_EXCHANGE, size * back)]
    return of_model, of_rows


def _norms(shape: Shape, layout: Layout, stage: int) -> _Joined:
    """Return the messages of two norms of each parameter, those of a norm's layer being one tensor here."""
    tensors, both = list(each_tensor(shape, layout, stage)), 2 * _FLOAT32
    split = sum(each.is_split for each in tensors)
    parameters = sum(len(_norm(shape)) if each.part == "norms" else 1 for each in tensors)
    of_model = [_Message(_GATHER, both * split * layout.model_parallel)]
    return of_model, [_Message(_GATHER, both * parameters * layout.row_ranks)]


def _maxima(shape: Shape, layout: Layout, stage: int) -> _Joined:
    """Return the messages of the maxima of columns, and over tensor-parallel ranks those of whole rows."""
    of_model, of_rows = 0, 0
    for tensor in each_tensor(shape, layout, stage):
        rows, columns = tensor.local_shape(layout.model_parallel)
        if columns is None:
            continue
        of_rows += columns
        if tensor.is_split:
            of_model += ceil(rows / layout.row_ranks) if tensor.splits_columns else columns
    return [_Message(_REDUCE, _FLOAT32 * of_model)], [_Message(_REDUCE, _FLOAT32 * of_rows)]


_JOINED: Mapping[JoinedParts, Callable[[Shape, Layout, int], _Joined]] = {
    "matrices": _matrices,
    "norms": _norms,
    "maxima": _maxima,
}
