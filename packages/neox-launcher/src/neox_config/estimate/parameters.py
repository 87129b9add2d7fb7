"""Number of parameters of the whole model by part, and of one device.

Each tensor of the model is one entry, from which counts and operations are computed exactly.

Known limit: stages hold equal numbers of layers, regardless of `pipe-partition-method`.

Sources: arXiv:1909.08053 (tensor parallelism), arXiv:2105.08050 (gMLP).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from neox_config.estimate.shapes import Layout, Shape
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.collectives import BUCKET_ELEMENTS, EARLY_BUCKET_ELEMENTS
from neox_config.facts.norms import NORM_FACTS

__all__ = [
    "Weights",
    "bucketed_parameters",
    "count_parameters",
    "each_tensor",
    "is_matrix_of_layer",
    "largest_block",
    "layer_weights",
    "local_parameters",
    "local_state_values",
    "outside_blocks",
    "stage_layers",
    "stage_types",
    "trained_parameters",
]


# Part of the model that the adapters of frozen weights are.
_ADAPTERS = "adapters"
# Shapes and layouts whose tensors are kept: a search for a layout asks for the same ones many times.
_MOST_KEPT = 1024


class Weights(NamedTuple):
    """One tensor of parameters.

    Attributes:
        part: part of the model that it belongs to.
        numbers: number of elements.
        is_split: True if it is split across tensor-parallel ranks, in rows of `row` elements.
        multiplies: True if every token is multiplied by it.
        row: number of elements of a matrix along the dimension that is not split; 1 for a vector.
        splits_columns: True if the columns of a matrix are split instead of its rows.
    """

    part: str
    numbers: int
    is_split: bool = False
    multiplies: bool = False
    row: int = 1
    splits_columns: bool = False

    def local_shape(self, ranks: int) -> tuple[int, int | None]:
        """Return the rows and columns of a tensor-parallel rank's part; None: a vector has no columns."""
        others = _local_count(self, ranks) // self.row
        if self.row == 1:
            return others, None
        return (self.row, others) if self.splits_columns else (others, self.row)


def count_parameters(shape: Shape) -> dict[str, int]:
    """Return the number of parameters of the whole model by part; a tied head has none."""
    counts = Counter(dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0))
    tensors = [*_embedding(shape), *_head(shape)]
    for kind in shape.owned_types:
        tensors += layer_weights(shape, kind)
    for tensor in tensors:
        counts[tensor.part] += shape.towers * tensor.numbers
    return dict(counts)


def _is_trained(shape: Shape, tensor: Weights) -> bool:
    """Return True unless the tensor is a weight of a model whose adapters alone are trained."""
    return not shape.adapter_rank or tensor.part == _ADAPTERS


@lru_cache(_MOST_KEPT)
def trained_parameters(shape: Shape, layout: Layout, stage: int) -> int:
    """Return the number of parameters of one device of a stage that are trained, before ZeRO."""
    tensors = _stage_tensors(shape, layout, stage)
    return sum(
        number * _local_count(tensor, layout.model_parallel)
        for number, tensor in tensors
        if _is_trained(shape, tensor)
    )


@lru_cache(_MOST_KEPT)
def local_parameters(shape: Shape, layout: Layout, stage: int) -> int:
    """Return the number of parameters of one device of a stage, before partitioning by ZeRO."""
    tensors = _stage_tensors(shape, layout, stage)
    return sum(number * _local_count(tensor, layout.model_parallel) for number, tensor in tensors)


def bucketed_parameters(shape: Shape, layout: Layout, *, later: int = 0, device: str = "cuda") -> list[int]:
    """Return the number of elements of each message in which stage 0 reduces the gradients of one device.

    Messages of the backward pass have the last parameters first. Other messages have matrices before vectors,
    which have no weight decay; the order within these is not exact.

    Args:
        shape: the model.
        layout: how it is run.
        later: elements that are reduced after the backward pass in any case, because they are summed over
            tensor-parallel ranks before.
        device: type of the devices.
    """
    if not layout.reduces_early(device):
        ordered = sorted(each_tensor(shape, layout), key=lambda tensor: tensor.row == 1)
        return _messages((_local_count(each, layout.model_parallel) for each in ordered), BUCKET_ELEMENTS)
    sizes, left = list[int](), later
    for tensor in reversed(list(each_tensor(shape, layout))):
        is_whole = not (tensor.is_split or tensor.multiplies)
        taken = min(left, tensor.numbers) if is_whole else 0
        sizes.append(_local_count(tensor, layout.model_parallel) - taken)
        left -= taken
    return [*_messages(sizes, EARLY_BUCKET_ELEMENTS), *_messages([later], BUCKET_ELEMENTS)]


def _messages(sizes: Iterable[int], limit: int) -> list[int]:
    """Return the sizes of messages with at most this number of elements, or with one larger tensor."""
    messages: list[int] = []
    for size in filter(None, sizes):
        if messages and messages[-1] + size <= limit:
            messages[-1] += size
        else:
            messages.append(size)
    return messages


def each_tensor(shape: Shape, layout: Layout, stage: int = 0) -> Iterator[Weights]:
    """Yield every trained tensor of a stage, the head of a single stage last."""
    for number, tensor in _stage_tensors(shape, layout, stage):
        if _is_trained(shape, tensor):
            yield from [tensor] * number


def largest_tensor(shape: Shape, layout: Layout, stage: int) -> int:
    """Return the number of parameters of the largest trained tensor of one device of a stage."""
    trained = (each for _, each in _stage_tensors(shape, layout, stage) if _is_trained(shape, each))
    return max((_local_count(tensor, layout.model_parallel) for tensor in trained), default=0)


def largest_block(shape: Shape, layout: Layout, stage: int) -> int:
    """Return the number of parameters of the largest part that `fully_shard` gathers by itself."""
    return max(_blocks(shape, layout, stage), default=0)


def outside_blocks(shape: Shape, layout: Layout, stage: int) -> int:
    """Return the number of parameters that are gathered together, for whole passes.

    These are the final norm, the head, and what several layers share.
    """
    return local_parameters(shape, layout, stage) - sum(_blocks(shape, layout, stage))


def _blocks(shape: Shape, layout: Layout, stage: int) -> list[int]:
    """Return the number of parameters of each layer, and of an embedding that is not tied to a head here."""
    ranks, blocks = layout.model_parallel, list[int]()
    if shape.weight_owners is None:
        for kind, number in Counter(stage_types(shape, layout, stage)).items():
            layer = sum(_local_count(tensor, ranks) for tensor in layer_weights(shape, kind))
            blocks += [layer] * number
    if stage == 0 and not (shape.is_tied and layout.stages == 1):
        blocks.append(sum(_local_count(tensor, ranks) for tensor in _embedding(shape)))
    return blocks * shape.towers


def local_state_values(shape: Shape, layout: Layout, stage: int, *, row_ranks: int = 1) -> int:
    """Return how many float32 values the optimizer stores for one device of a stage.

    Args:
        shape: the model.
        layout: how it is run.
        stage: the pipeline stage.
        row_ranks: number of ranks that divide the rows of each weight.
    """
    divided, whole = 0, 0
    for number, tensor in _stage_tensors(shape, layout, stage):
        if not _is_trained(shape, tensor):
            continue
        rows, columns = tensor.local_shape(layout.model_parallel)
        of_matrices = layout.optimizer_states if layout.matrix_states is None else layout.matrix_states
        each = of_matrices if is_matrix_of_layer(tensor) else layout.optimizer_states
        divided += number * each * rows * (columns or 1)
        if layout.has_slice_states:
            divided += number * rows
            whole += number * (columns or 0)
    return ceil(divided / row_ranks) + whole + replica_values(shape, layout, stage)


def is_matrix_of_layer(tensor: Weights) -> bool:
    """Return True for the matrix of a linear layer, without the head, which Muon makes orthogonal."""
    return tensor.multiplies and tensor.part != "head"


def replica_values(shape: Shape, layout: Layout, stage: int) -> int:
    """Return how many of these values differ between replicas: a number per parameter, and a share of one."""
    if not layout.has_replica_states or layout.data_parallel == 1:
        return 0
    local = trained_parameters(shape, layout, stage)
    return local + ceil(local / layout.data_parallel)


@lru_cache(_MOST_KEPT)
def _stage_tensors(shape: Shape, layout: Layout, stage: int) -> Sequence[tuple[int, Weights]]:
    """Return the tensors of a stage, each with how often it occurs."""
    tower = _tower_tensors(shape, layout, stage)
    return tuple((shape.towers * number, tensor) for number, tensor in tower)


def _tower_tensors(shape: Shape, layout: Layout, stage: int) -> Iterator[tuple[int, Weights]]:
    if stage == 0:
        yield from ((1, tensor) for tensor in _embedding(shape))
    kinds = Counter(shape.owned_within(stage_layers(shape, layout, stage)))
    for kind, number in kinds.items():
        yield from ((number, tensor) for tensor in layer_weights(shape, kind))
    if stage == layout.stages - 1:
        yield from ((1, tensor) for tensor in _head(shape))
        if shape.is_tied and layout.stages > 1:
            yield 1, _vocabulary(shape, "head")


def stage_types(shape: Shape, layout: Layout, stage: int) -> tuple[str, ...]:
    """Return the attention types of the layers of a stage."""
    return tuple(shape.attention_types[layer] for layer in stage_layers(shape, layout, stage))


def stage_layers(shape: Shape, layout: Layout, stage: int) -> range:
    """Return the layers of a stage; the first stages have one more if the layers do not divide evenly."""
    each, rest = divmod(shape.num_layers, layout.stages)
    start = stage * each + min(stage, rest)
    return range(start, start + each + (stage < rest))


def _local_count(tensor: Weights, ranks: int) -> int:
    return ceil(tensor.numbers // tensor.row / ranks) * tensor.row if tensor.is_split else tensor.numbers


def _vocabulary(shape: Shape, part: str) -> Weights:
    numbers, is_head = shape.vocab_size * shape.hidden_size, part == "head"
    return Weights(part, numbers, is_split=True, multiplies=is_head, row=shape.hidden_size)


def _embedding(shape: Shape) -> Iterator[Weights]:
    yield _vocabulary(shape, "embedding")
    if shape.position == "learned":
        yield Weights("positions", shape.max_positions * shape.hidden_size, row=shape.hidden_size)


def _head(shape: Shape) -> Iterator[Weights]:
    yield _norm(shape, shape.hidden_size)
    if shape.embedding_size is not None:
        size = shape.embedding_size
        yield Weights("head", size * shape.hidden_size, is_split=True, row=shape.hidden_size)
        yield Weights("head", size, is_split=True)
    elif not shape.is_tied:
        yield _vocabulary(shape, "head")


@lru_cache(_MOST_KEPT)
def layer_weights(shape: Shape, kind: str) -> Sequence[Weights]:
    """Return the tensors of one layer with an attention type."""
    is_gmlp = ATTENTION_FACTS[kind].is_gmlp
    return tuple(_gmlp_layer(shape, kind) if is_gmlp else _transformer_layer(shape))


def _transformer_layer(shape: Shape) -> Iterator[Weights]:
    width = shape.hidden_size
    yield _norm(shape, width)
    outputs = width + 2 * shape.key_width
    has_bias = shape.has_qkv_bias
    yield from _adapted(shape, "qkv", "attention", width, outputs, is_column=True, bias=has_bias)
    yield from _adapted(shape, "dense", "attention", width, width, is_column=False)
    if shape.position == "rpe":
        numbers = shape.rpe_buckets * shape.heads
        yield Weights("positions", numbers, is_split=True, row=shape.rpe_buckets, splits_columns=True)
    yield _norm(shape, width)
    for name in ("up", "gate") if shape.is_gated else ("up",):
        yield from _adapted(shape, name, "mlp", width, shape.mlp_width, is_column=True)
    yield from _adapted(shape, "down", "mlp", shape.mlp_width, width, is_column=False)


def _adapted(
    shape: Shape,
    name: str,
    part: str,
    inputs: int,
    outputs: int,
    *,
    is_column: bool,
    bias: bool | None = None,
) -> Iterator[Weights]:
    """Yield the tensors of a projection, and of its adapter if it has one; `bias` as for `_linear`."""
    yield from _linear(shape, part, inputs, outputs, is_column=is_column, bias=bias)
    if shape.adapter_rank and name in shape.adapted:
        rank = shape.adapter_rank
        a_row, b_row = (inputs, rank) if is_column else (rank, rank)
        splits = not is_column
        yield Weights(_ADAPTERS, rank * inputs, splits, multiplies=True, row=a_row, splits_columns=splits)
        yield Weights(_ADAPTERS, outputs * rank, is_split=is_column, multiplies=True, row=b_row)


def _gmlp_layer(shape: Shape, kind: str) -> Iterator[Weights]:
    """Yield the tensors of a gMLP layer: norm, twice h to 4h, spatial gate, 4h to h; amlp adds attention."""
    width = shape.hidden_size
    yield _norm(shape, width)
    for _ in range(2):
        yield from _linear(shape, "mlp", width, 4 * width, is_column=True)
    yield _norm(shape, 4 * width)
    yield Weights("mlp", shape.seq_length**2, row=shape.seq_length)
    yield Weights("mlp", shape.seq_length)
    yield from _linear(shape, "mlp", 4 * width, width, is_column=False)
    if ATTENTION_FACTS[kind].has_inner_attention and shape.gmlp_attention_width is not None:
        inner = 3 * shape.gmlp_attention_width
        yield from _linear(shape, "attention", 4 * width, inner, is_column=False)
        yield from _linear(shape, "attention", 4 * width, inner, is_column=False, bias=False)
        yield from _linear(shape, "attention", shape.gmlp_attention_width, 4 * width, is_column=True)


def _norm(shape: Shape, width: int) -> Weights:
    return Weights("norms", NORM_FACTS[shape.norm].num_weights(width, with_bias=shape.has_norm_bias))


def _linear(
    shape: Shape, part: str, inputs: int, outputs: int, *, is_column: bool, bias: bool | None = None
) -> Iterator[Weights]:
    """Yield the tensors of a column-parallel (bias split) or row-parallel (bias replicated) projection.

    `bias` overrides the setting of the part.
    """
    row = inputs if is_column else outputs
    yield Weights(
        part, inputs * outputs, is_split=True, multiplies=True, row=row, splits_columns=not is_column
    )
    has_bias = shape.has_attention_bias if part == "attention" else shape.has_bias
    if has_bias if bias is None else bias:
        yield Weights(part, outputs, is_split=is_column)
