"""Collectives of one training step: calls and bytes of each device, by part of the step and operation.

The counts are those of the model's own communication, of the update at ZeRO stage 0, and of optimizers that
join parts of weights; a test compares them with what real processes call. The bytes are those of the
messages: of all_gather the output, of reduce_scatter and all_to_all the input.

Sources: arXiv:1909.08053, section 3 (tensor parallelism), arXiv:2205.05198, section 4.2.2 (of the sequence).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from neox_config.errors import ConfigError
from neox_config.estimate.memory import hidden_bytes
from neox_config.estimate.mixers import Message, costs_of
from neox_config.estimate.parameters import (
    bucketed_parameters,
    each_tensor,
    is_matrix_of_layer,
    stage_layers,
    weights_within,
)
from neox_config.estimate.setup import Setup
from neox_config.extras.compression.matrices import compresses
from neox_config.facts.collectives import BUS_SHARE
from neox_config.facts.loss import CHUNK_NUMBERS
from neox_config.facts.optimizers import JoinedParts
from neox_config.spec.model import Layer, Learned, Retrieval
from neox_config.spec.resolve import Resolved

__all__ = [
    "Collective",
    "expert_bytes",
    "model_bytes",
    "not_counted",
    "optimizer_bytes",
    "product_bytes",
    "refuse_unknown",
    "step_collectives",
]

_REDUCE, _GATHER, _SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
_EXCHANGE = "all_to_all_single"
_FLOAT32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Calls of one operation in one part of a step.

    Args:
        part: part of the step.
        operation: name in torch.distributed.
        group: "model", "data", "experts" or "copies of experts".
        calls: per update.
        bytes: of the messages of all calls together.
    """

    part: str
    operation: str
    group: str
    calls: int
    bytes: int


def refuse_unknown(resolved: Resolved) -> None:
    """Raise an error if the collectives of a run are not known.

    Raises:
        ConfigError: it is a pipeline, trains adapters, or has compressed matrices, towers or layers that drop
            tokens.
    """
    model, run = resolved.model, resolved.run
    unknown = {
        "pipelines (pipe-parallel-size)": run.layout.stages > 1,
        "low-rank adapters (lora-rank)": model.adapters is not None,
        "layers that drop tokens (random_ltd)": bool(run.dropout.token_layers),
        "compressed matrices (compression_training)": compresses(resolved.config),
        "two towers (objective: ict)": isinstance(model.head, Retrieval),
    }
    names = [name for name, is_used in unknown.items() if is_used]
    if names:
        raise ConfigError(
            f"--step does not count the collectives of {' and '.join(names)}; remove the setting, or leave "
            "out --step"
        )


def not_counted(setup: Setup) -> str | None:
    """Return what communicates over the data-parallel ranks in a way that is not counted; None if nothing."""
    if setup.run.layout.data == 1 and setup.run.layout.zero == 0:
        return None
    if setup.run.layout.zero > 0:
        return f"what the engine sends at ZeRO stage {setup.run.layout.zero}: gradients, weights and norms"
    return "the optimizer's averages over data-parallel ranks" if setup.optimizer.replica_states else None


def model_bytes(setup: Setup) -> int:
    """Return the bytes that the busiest device sends over its tensor-parallel ranks per update, in rings."""
    if setup.run.layout.tensor == 1:
        return 0
    return max(
        sum(_sent(each, setup.run.layout.tensor) for each in _of_model(setup, "cuda", stage))
        + optimizer_bytes(setup, stage, "model")
        for stage in {0, setup.run.layout.stages - 1}
    )


def optimizer_bytes(setup: Setup, stage: int, group: str) -> int:
    """Return the bytes that a device of a stage sends over a group for what its optimizer joins, in rings."""
    size = setup.run.layout.tensor if group == "model" else setup.run.layout.data
    joined = _of_optimizer(setup, stage)
    return sum(_sent(each, size) for each in joined if each.group == group)


def expert_bytes(setup: Setup) -> int:
    """Return the bytes of rows, and their numbers, that the busiest device sends to others per update."""
    size, stages = setup.run.layout.experts, range(setup.run.layout.stages)
    sent = ((each for each in _of_experts(setup, stage) if each.operation == _EXCHANGE) for stage in stages)
    return max(sum(_sent(each, size) for each in messages) for messages in sent)


def _sent(collective: Collective, size: int) -> int:
    return round(collective.bytes * BUS_SHARE[collective.operation](size))


def step_collectives(setup: Setup, *, device: str = "cuda") -> tuple[Collective, ...]:
    """Return the collectives of one update, without those of hooks such as logging and saving.

    Args:
        setup: what is estimated.
        device: type of the devices, on which the chunks of the loss and the messages of gradients depend.
    """
    rows = list(_of_model(setup, device, 0)) if setup.run.layout.tensor > 1 else []
    rows += [*_of_experts(setup, 0), *_of_optimizer(setup, 0), *_of_data(setup, device)]
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


def _of_model(setup: Setup, device: str, stage: int) -> Iterator[Collective]:
    """Yield the collectives over tensor-parallel ranks of a pipeline stage."""
    is_first, is_last = stage == 0, stage == setup.run.layout.stages - 1
    micro_batch = [
        *(("embedding", message) for message in _embedding(setup) if is_first),
        *_layers(setup, [setup.model.layers[layer] for layer in _layers_of(setup, stage)]),
        *(("head and loss", message) for message in _head(setup, device) if is_last),
    ]
    partial, once = _partial(setup, stage), list[Message]()
    if setup.run.layout.zero > 0 and setup.run.engine.name == "deepspeed":
        # It reduces gradients in every backward pass, so that each is summed there.
        size = setup.element_bytes
        micro_batch += [("replicated parameters", Message(_REDUCE, size * each)) for each in partial]
    elif partial:
        once.append(Message(_REDUCE, _partial_bytes(setup, partial)))
    for part, message in micro_batch:
        yield _collective(part, message, "model", setup.run.batch.accumulation)
    if setup.run.layout.zero == 0:
        # The norm of the gradients.
        once.append(Message(_REDUCE, _FLOAT32))
    for message in once:
        yield _collective("update", message, "model")


def _partial_bytes(setup: Setup, partial: list[int]) -> int:
    """Return the bytes of the message that sums partial gradients once per update."""
    if setup.run.layout.zero > 0 and setup.run.layout.data > 1:
        # Each data-parallel rank has a part of them.
        return _FLOAT32 * sum(ceil(each / setup.run.layout.data) for each in partial)
    return setup.accumulated_bytes * sum(partial)


def _collective(part: str, message: Message, group: str, calls: int = 1) -> Collective:
    return Collective(
        part=part, operation=message.operation, group=group, calls=calls, bytes=calls * message.bytes
    )


def _embedding(setup: Setup) -> Iterator[Message]:
    whole = hidden_bytes(setup)
    if setup.run.layout.splits_sequence:
        yield from (Message(_SCATTER, whole), Message(_GATHER, whole))
    else:
        yield Message(_REDUCE, whole)


def _head(setup: Setup, device: str) -> Iterator[Message]:
    """Yield the messages of the head, whose input is gathered or its gradient summed, and of the loss."""
    whole = hidden_bytes(setup)
    if setup.run.layout.splits_sequence:
        yield from (Message(_GATHER, whole), Message(_SCATTER, whole))
    else:
        yield Message(_REDUCE, whole)
    tokens = setup.run.batch.length * setup.run.batch.micro
    columns = ceil(setup.entries / setup.run.layout.tensor)
    chunk = max(1, CHUNK_NUMBERS[device] // columns) if setup.has_loss_in_chunks else tokens
    for first in range(0, tokens, chunk):
        # Two numbers per token, of each rank.
        sent = 2 * _FLOAT32 * min(chunk, tokens - first) * setup.run.layout.tensor
        yield Message(_GATHER, sent)


def _layers_of(setup: Setup, stage: int) -> range:
    return stage_layers(setup.model, setup.run.layout.stages, stage)


def _layers(setup: Setup, layers: Sequence[Layer]) -> Iterator[tuple[str, Message]]:
    passes = [_layer(setup, layer) for layer in layers]
    for forward, backward in passes:
        yield from (("layers, forward", message) for message in forward)
        yield from (("layers, backward", message) for message in backward)
    recomputation = setup.run.recomputation
    if recomputation.segment is None:
        return
    for first in range(0, len(passes), recomputation.segment):
        segment = passes[first : first + recomputation.segment]
        again = [message for forward, _ in segment for message in forward]
        # The output of the segment is not needed, so that its last sum is left out, unless dropout follows.
        again = again if setup.run.dropout.hidden > 0 else again[:-1]
        yield from (("layers, recomputed", message) for message in again)
        if recomputation.partitions_inputs and not setup.run.layout.splits_sequence:
            yield "layers, recomputed", Message(_GATHER, _padded(setup, hidden_bytes(setup)))


def _padded(setup: Setup, whole: int) -> int:
    """Return the bytes of hidden states that are divided into equal parts."""
    size, ranks = setup.element_bytes, setup.run.layout.tensor
    return ceil(whole // size / ranks) * ranks * size


def _layer(setup: Setup, layer: Layer) -> tuple[list[Message], list[Message]]:
    """Return the messages of one layer in its forward and backward pass, in the forward pass in order."""
    whole, costs = hidden_bytes(setup), costs_of(layer)
    product = product_bytes(setup, whole)
    tokens = whole // setup.element_bytes // setup.model.width
    inner = [cost.messages(each, layer, setup.model, product, tokens) for each, cost in costs]
    inside = [message for forward, _ in inner for message in forward]
    inside_backward = [message for _, backward in inner for message in backward]
    once = _enters_once(setup, layer)
    # The outputs of both branches are summed over the ranks together, unless dropout follows each.
    sums = [product] * (1 if once and setup.run.dropout.hidden == 0.0 else len(costs))
    if not setup.run.layout.splits_sequence:
        entries = [whole] * (1 if once else len(costs))
        forward = [*inside, *(Message(_REDUCE, each) for each in sums)]
        return forward, [*inside_backward, *(Message(_REDUCE, each) for each in entries)]
    # With a parallel residual, both branches enter in one message, or what both read.
    entries = [whole if layer.shares_norm else 2 * whole] if once else [whole] * len(costs)
    enter, leave = ([Message(kind, each) for each in entries] for kind in (_GATHER, _SCATTER))
    again = [Message(_GATHER, product_bytes(setup, each)) for each in entries if setup.gathers_again]
    forward = [*enter, *inside, *(Message(_SCATTER, each) for each in sums)]
    return forward, [*(Message(_GATHER, each) for each in sums), *inside_backward, *again, *leave]


def product_bytes(setup: Setup, whole: int) -> int:
    """Return the bytes of factors and results of matrix products, which amp computes in 16 bit."""
    return whole // 2 if setup.run.precision.autocast else whole


def _enters_once(setup: Setup, layer: Layer) -> bool:
    """Return True if both branches of a layer enter the split together; layers with adapters do not."""
    has_both = layer.channel is not None and layer.residual == "parallel"
    return has_both and setup.model.adapters is None


def _partial(setup: Setup, stage: int) -> list[int]:
    """Return the number of elements of each parameter of which every rank computes a part of the gradient."""
    found: list[int] = []
    model, layout = setup.model, setup.run.layout
    for layer in (model.layers[each] for each in weights_within(model, _layers_of(setup, stage))):
        costs = costs_of(layer)
        if layout.splits_sequence or _enters_once(setup, layer):
            found += layer.norm.sizes(model.width) * sum(layer.norms)
        for each, cost in costs:
            found += cost.partial(each, layer, model)
            if layout.splits_sequence and cost.bias(each):
                found.append(model.width)
    if layout.splits_sequence and stage == layout.stages - 1:
        found += model.norm.sizes(model.width)
    if layout.splits_sequence and stage == 0 and isinstance(model.embedding.position, Learned):
        found.append(model.embedding.position.rows * model.width)
    return found


def _of_experts(setup: Setup, stage: int) -> Iterator[Collective]:
    """Yield the exchanges of rows between the ranks that divide experts, if all experts have as many rows."""
    if setup.run.layout.experts == 1:
        return
    for each, cost in (
        found for layer in _layers_of(setup, stage) for found in costs_of(setup.model.layers[layer])
    ):
        if cost.exchanged(each) == 0:
            continue
        counts = Message(_EXCHANGE, _INT64 * each.number)
        # To the rank with the expert, and back.
        rows = [Message(_EXCHANGE, cost.exchanged(each) * product_bytes(setup, hidden_bytes(setup)))] * 2
        passes = {"forward": [counts, *rows], "backward": rows}
        if setup.run.recomputation.segment is not None:
            passes["recomputed"] = [counts, *rows]
        for name, messages in passes.items():
            for message in messages:
                yield _collective(f"layers, {name}", message, "experts", setup.run.batch.accumulation)
    if setup.run.layout.zero == 0:
        # Of the norm of the gradients.
        yield _collective("update", Message(_REDUCE, _FLOAT32), "experts")


def _of_data(setup: Setup, device: str) -> Iterator[Collective]:
    """Yield the collectives over data-parallel ranks: gradients, the loss, and the number of its tokens."""
    if setup.run.layout.data == 1:
        return
    if setup.run.layout.zero == 0 and not setup.optimizer.replica_states:
        later = sum(_partial(setup, 0)) if setup.run.layout.tensor > 1 else 0
        for elements in bucketed_parameters(setup, later=later, device=device):
            yield _collective("update", Message(_REDUCE, setup.reduced_bytes * elements), "data")
        if setup.run.layout.data > setup.run.layout.experts > 1:
            for elements in bucketed_parameters(setup, device=device, of_experts=True):
                message = Message(_REDUCE, setup.reduced_bytes * elements)
                yield _collective("update", message, "copies of experts")
    counted = sum(
        each.number
        for layer in _layers_of(setup, 0)
        for each, cost in costs_of(setup.model.layers[layer])
        if cost.exchanged(each)
    )
    if counted:
        yield _collective("balance of experts", Message(_REDUCE, _INT64 * counted), "data")
    scalars = 2 if setup.weighs_globally else 1
    yield _collective("head and loss", Message(_REDUCE, _FLOAT32), "data", scalars)


def _of_optimizer(setup: Setup, stage: int) -> Iterator[Collective]:
    """Yield the collectives of an optimizer that joins what it computes of the parts of weights."""
    if setup.optimizer.gathers_rows is None:
        return
    of_model, of_rows = _JOINED[setup.optimizer.gathers_rows](setup, stage)
    if setup.row_ranks > 1:
        yield from (_collective("update", message, "data") for message in of_rows)
    if setup.run.layout.tensor > 1:
        yield from (_collective("update", message, "model") for message in of_model)


# Messages over tensor-parallel ranks, and over those that divide rows.
_Joined = tuple[list[Message], list[Message]]


def _matrices(setup: Setup, stage: int) -> _Joined:
    """Return the messages of momenta that are made orthogonal, one matrix at a time on each rank.

    Ranks that divide rows send theirs to the rank that has the matrix, and get rows of the result back. The
    first rank has the largest of each turn. Sums of the squares of rows are joined afterwards.
    """
    ranks, size = setup.row_ranks, setup.element_bytes
    found = [each for each in each_tensor(setup, stage) if is_matrix_of_layer(each)]
    matrices, stacks = ([each for each in found if (each.matrices > 1) is many] for many in (False, True))
    matrices.sort(key=lambda tensor: tensor.numbers, reverse=True)
    of_model = [Message(_GATHER, size * each.numbers) for each in matrices[::ranks] if each.is_split]
    of_rows = list[Message]()
    # A rank has whole matrices of a stack.
    for each in stacks:
        own = ceil(each.matrices / ranks)
        of_model.append(Message(_GATHER, size * own * (each.numbers // each.matrices)))
        if setup.row_states:
            numbers = own * (each.local_shape(1)[0] // each.matrices) if each.splits_columns else own
            of_model.append(Message(_REDUCE, _FLOAT32 * numbers))
    for start in range(0, len(matrices), ranks):
        parts = [each.local_shape(setup.run.layout.tensor) for each in matrices[start : start + ranks]]
        there = sum(ceil(rows / ranks) * (columns or 1) for rows, columns in parts)
        back = parts[0][0] * (parts[0][1] or 1)
        of_rows += [Message(_EXCHANGE, size * there), Message(_EXCHANGE, size * back)]
    for each in matrices if setup.row_states else ():
        rows, _ = each.local_shape(1)
        if each.is_split:
            own = ceil(rows / ranks) if each.splits_columns else rows
            of_model.append(Message(_REDUCE, _FLOAT32 * own))
        of_rows.append(Message(_REDUCE, _FLOAT32 * rows))
    return of_model, of_rows


def _norms(setup: Setup, stage: int) -> _Joined:
    """Return the messages of two norms of each parameter, those of a norm's layer being one tensor here."""
    tensors, both = list(each_tensor(setup, stage)), 2 * _FLOAT32
    split = sum(each.is_split for each in tensors)
    parameters = sum(len(setup.model.norm.sizes(1)) if each.part == "norms" else 1 for each in tensors)
    of_model = [Message(_GATHER, both * split * setup.run.layout.tensor)]
    return of_model, [Message(_GATHER, both * parameters * setup.row_ranks)]


def _maxima(setup: Setup, stage: int) -> _Joined:
    """Return the messages of the maxima of columns, and over tensor-parallel ranks those of whole rows."""
    of_model, of_rows = 0, 0
    for tensor in each_tensor(setup, stage):
        rows, columns = tensor.local_shape(setup.run.layout.tensor)
        if columns is None:
            continue
        of_rows += columns
        if tensor.is_split:
            of_model += ceil(rows / setup.row_ranks) if tensor.splits_columns else columns
    return [Message(_REDUCE, _FLOAT32 * of_model)], [Message(_REDUCE, _FLOAT32 * of_rows)]


_JOINED: Mapping[JoinedParts, Callable[[Setup, int], _Joined]] = {
    "matrices": _matrices,
    "norms": _norms,
    "maxima": _maxima,
}
