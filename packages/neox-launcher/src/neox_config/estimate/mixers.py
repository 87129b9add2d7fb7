"""What kinds of layers cost: a row per class of `Layer.mixer` and of `Layer.channel`.

Each tensor is one entry, from which counts and operations are computed exactly. The norm before a mixer is
not part of it.

Sources: arXiv:1909.08053 (tensor parallelism), arXiv:2105.08050 (gMLP), arXiv:2205.05198 (activations).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from neox_config.estimate.setup import Setup
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.norms import NORM_FACTS
from neox_config.spec.model import (
    MLP,
    Attention,
    Experts,
    Layer,
    ModelSpec,
    Norm,
    Rotary,
    Rpe,
    SpatialMLP,
)
from neox_config.spec.run import RunSpec

__all__ = [
    "ADAPTERS",
    "Convention",
    "Cost",
    "Message",
    "Weights",
    "core_operations",
    "costs_of",
    "keeps_scores",
    "kept_by_norm",
    "keys_per_query",
    "norm_weights",
]

ADAPTERS = "adapters"
"""Part of the model that the adapters of frozen weights are."""

Convention = Literal["full", "causal"]


class Weights(NamedTuple):
    """One tensor of parameters.

    Attributes:
        part: part of the model that it belongs to.
        numbers: number of elements.
        is_split: True if it is split across tensor-parallel ranks, in rows of `row` elements.
        multiplies: True if every token is multiplied by it.
        row: number of elements of a matrix along the dimension that is not split; 1 for a vector.
        splits_columns: True if the columns of a matrix are split instead of its rows.
        active: numbers by which a token is multiplied, of a tensor of all experts; None: all of them.
        matrices: the number of matrices that are stacked in it.
    """

    part: str
    numbers: int
    is_split: bool = False
    multiplies: bool = False
    row: int = 1
    splits_columns: bool = False
    active: int | None = None
    matrices: int = 1

    @property
    def used(self) -> int:
        """Number of elements that a token uses."""
        return self.numbers if self.active is None else self.active

    def local_count(self, ranks: int, experts: int = 1) -> int:
        """Return the number of elements of a rank's part.

        Args:
            ranks: the tensor-parallel size.
            experts: the expert-parallel size.
        """
        split = -(-(self.numbers // self.row) // ranks) * self.row if self.is_split else self.numbers
        return split if self.active is None else split // experts

    def local_shape(self, ranks: int, experts: int = 1) -> tuple[int, int | None]:
        """Return the rows and columns of a rank's part, as `local_count`; None: a vector has no columns."""
        if self.splits_columns and self.active is not None:
            # The row contains the number of experts.
            return self.row // experts, self.local_count(ranks) // self.row
        others = self.local_count(ranks, experts) // self.row
        if self.row == 1:
            return others, None
        return (self.row, others) if self.splits_columns else (others, self.row)


class Message(NamedTuple):
    """One message of a collective operation, by its name in torch.distributed."""

    operation: str
    bytes: int


# Those of the forward and of the backward pass.
_Messages = tuple[Sequence[Message], Sequence[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one kind costs. Functions take the mixer, and of its layer, model and setup what they read.

    Args:
        tensors: its tensors, in order: (mixer, layer, model).
        kept: bytes per token that the backward pass needs, besides the input and scores: (mixer, layer,
            setup, whether the layer is compiled, type of device).
        bias: its output projection has a bias, which every tensor-parallel rank adds.
        operations: operations of a token without weights: (mixer, model, tokens of a sample, convention).
        scores: bytes per token of what checkpoint_granularity: selective computes again, with all operations
            without weights; None: it leaves this kind alone.
        messages: tensor-parallel messages inside, given the bytes of hidden states and the number of tokens:
            (mixer, layer, model, bytes, tokens).
        partial: sizes of whole tensors of which every tensor-parallel rank computes a part of the gradient:
            (mixer, layer, model).
        exchanged: rows per token that ranks which divide experts exchange, each of the model's width.
    """

    tensors: Callable[[Any, Layer, ModelSpec], Iterator[Weights]]
    kept: Callable[[Any, Layer, Setup, bool, str], int]
    bias: Callable[[Any], bool]
    operations: Callable[[Any, ModelSpec, int, Convention], int] = lambda mixer, model, length, convention: 0
    scores: Callable[[Any, Setup], int] | None = None
    messages: Callable[[Any, Layer, ModelSpec, int, int], _Messages] = lambda *_: ((), ())
    partial: Callable[[Any, Layer, ModelSpec], Sequence[int]] = lambda mixer, layer, model: ()
    exchanged: Callable[[Any], int] = lambda mixer: 0


def costs_of(layer: Layer) -> list[tuple[Any, Cost]]:
    """Return the mixer of a layer, and its channel mixer if it has one, each with what it costs."""
    return [(each, _COSTS[type(each)]) for each in (layer.mixer, layer.channel) if each is not None]


def core_operations(layer: Layer, model: ModelSpec, length: int, convention: Convention) -> int:
    """Return the operations of a token in a layer that have no weights."""
    return sum(cost.operations(each, model, length, convention) for each, cost in costs_of(layer))


def keys_per_query(mixer: Attention, model: ModelSpec, length: int) -> int:
    """Return the number of keys that a query is multiplied with, not halved for the causal mask."""
    if mixer.pattern is None:
        return length
    block = mixer.pattern.block
    blocks = mixer.pattern.blocks_per_query(length / block, both_ways=model.is_encoder)
    return min(length, round(blocks * block))


def keeps_scores(mixer: Attention, run: RunSpec) -> bool:
    """Return True if attention stores its scores, instead of being computed by flash attention."""
    # FlexAttention has no dropout.
    is_eager = bool(mixer.changes_scores) and run.dropout.attention > 0
    return run.fusions.stores_scores or isinstance(mixer.position, Rpe) or is_eager


def kept_by_norm(norm: Norm, width: int, size: int, device: str, *, is_compiled: bool) -> int:
    """Return the bytes per token of a norm: its input, or two float32 tensors if it is several operators."""
    is_one = is_compiled or device in NORM_FACTS[norm.kind].one_operator_on
    # Of a weight that is stored minus 1, the input is converted to float32, in which the weight is.
    return ((size if is_compiled or not norm.zero_centered else 4) if is_one else 8) * width


def norm_weights(norm: Norm, width: int) -> Weights:
    """Return all weights of a norm as one entry."""
    return Weights("norms", norm.num_weights(width))


def _counted(model: ModelSpec, keys: int, length: int, convention: Convention) -> float:
    """Return how many of the keys of a query are counted, as a mean over the sequence.

    The first queries of a causal sequence see less than a window: of a window as long as the sequence, half.
    """
    if convention == "full" or model.is_encoder:
        return keys
    return keys - keys**2 / (2 * length)


def _linear(part: str, inputs: int, outputs: int, *, is_column: bool, bias: bool) -> Iterator[Weights]:
    """Yield the tensors of a column-parallel (bias split) or row-parallel (bias replicated) projection."""
    row = inputs if is_column else outputs
    yield Weights(
        part, inputs * outputs, is_split=True, multiplies=True, row=row, splits_columns=not is_column
    )
    if bias:
        yield Weights(part, outputs, is_split=is_column)


def _adapted(
    model: ModelSpec, name: str, part: str, inputs: int, outputs: int, *, is_column: bool, bias: bool
) -> Iterator[Weights]:
    """Yield the tensors of a projection, and of its adapter if it has one."""
    yield from _linear(part, inputs, outputs, is_column=is_column, bias=bias)
    if model.adapters is not None and name in model.adapters.matrices:
        rank, splits = model.adapters.rank, not is_column
        a_row, b_row = (inputs, rank) if is_column else (rank, rank)
        yield Weights(ADAPTERS, rank * inputs, splits, multiplies=True, row=a_row, splits_columns=splits)
        yield Weights(ADAPTERS, outputs * rank, is_split=is_column, multiplies=True, row=b_row)


def _tensors_of_attention(mixer: Attention, layer: Layer, model: ModelSpec) -> Iterator[Weights]:
    width, query, keys = model.width, mixer.query_width, 2 * mixer.key_width
    yield from _adapted(model, "qkv", "attention", width, query + keys, is_column=True, bias=mixer.qkv_bias)
    yield from _adapted(model, "dense", "attention", query, width, is_column=False, bias=mixer.output_bias)
    for norm_width in mixer.qk_norm_widths.values():
        yield Weights("norms", layer.norm.num_weights(norm_width), _splits_qk_norm(mixer, layer.norm))
    if mixer.gate != "none":
        yield from _linear("attention", width, mixer.gate_width, is_column=True, bias=False)
    if mixer.sinks:
        yield Weights("attention", mixer.heads, is_split=True)
    if isinstance(mixer.position, Rpe):
        buckets = mixer.position.buckets
        yield Weights("positions", buckets * mixer.heads, is_split=True, row=buckets, splits_columns=True)


def _splits_qk_norm(mixer: Attention, norm: Norm) -> bool:
    """Return True if the weights of norms of queries and keys are split with the heads."""
    return mixer.qk_norm != "head" and not NORM_FACTS[norm.kind].scalars


def _partial_of_attention(mixer: Attention, layer: Layer, model: ModelSpec) -> list[int]:
    """Return the weights of norms of queries and keys that ranks apply to their own heads."""
    widths = [] if _splits_qk_norm(mixer, layer.norm) else mixer.qk_norm_widths.values()
    return [each for width in widths for each in layer.norm.sizes(width)]


def _sums_over_ranks(mixer: Attention, norm: Norm) -> bool:
    """Return True if norms of queries and keys are over the heads of all ranks."""
    return mixer.qk_norm == "width" or (mixer.qk_norm == "shared" and NORM_FACTS[norm.kind].subtracts_mean)


def _messages_of_attention(
    mixer: Attention, layer: Layer, model: ModelSpec, size: int, tokens: int
) -> _Messages:
    """Return the sums over all ranks' heads for norms of queries and of keys, which are float32."""
    facts = NORM_FACTS[layer.norm.kind]
    if not _sums_over_ranks(mixer, layer.norm):
        return (), ()
    sums = [Message("all_reduce", 4 * tokens)] * (4 if facts.subtracts_mean else 2)
    return sums, sums


def _operations_of_attention(mixer: Attention, model: ModelSpec, length: int, convention: Convention) -> int:
    keys = keys_per_query(mixer, model, length)
    return round(4 * _counted(model, keys, length, convention) * mixer.query_width)


def _kept_by_attention(mixer: Attention, layer: Layer, setup: Setup, is_compiled: bool, device: str) -> int:
    """Return the bytes per token of attention without its scores: query, key, value and context."""
    width, key_width, run = mixer.query_width, mixer.key_width, setup.run
    kept = 2 * width + 2 * key_width
    if mixer.gate != "none":
        # What the gate is, and the product with it.
        kept += mixer.gate_width + width
    # With rope_fusion: auto a trial decides, and more memory is the safe estimate.
    rotates_in_place = run.fusions.rope is True and mixer.heads == mixer.kv_heads and mixer.qk_norm is None
    if rotates_in_place and not run.fusions.has_second_derivatives and not is_compiled:
        return kept * setup.element_bytes
    of_norms = 0
    if mixer.qk_norm is not None:
        # A norm of one operator keeps its input, which is a part of the projection, as the value is.
        of_norms = kept_by_norm(layer.norm, width + key_width, 0, device, is_compiled=is_compiled)
        if _sums_over_ranks(mixer, layer.norm) and run.layout.tensor > 1:
            of_norms = 8 * (width + key_width)
    if (mixer.qk_norm or isinstance(mixer.position, Rotary)) and not keeps_scores(mixer, run):
        # Query and key are rotated into new tensors, while the value keeps the memory of all three alive.
        kept += width + key_width
    elif mixer.head_width < key_width < width:
        # Queries that share a key are copied, because they are interleaved with the keys.
        kept += width
    return kept * setup.element_bytes + of_norms


def _scores(mixer: Attention, setup: Setup) -> int:
    """Return the bytes per token of the scores, or of their sums if scores are not stored."""
    if not keeps_scores(mixer, setup.run):
        return 4 * mixer.heads
    size = setup.element_bytes
    if mixer.changes_scores:
        # They are limited, and their softmax is computed, in float32, and kept.
        size += 8 if mixer.softcap is not None else 4
    per_score = 2 * size + 1 if setup.run.dropout.attention > 0 else size
    return per_score * mixer.heads * keys_per_query(mixer, setup.model, setup.run.batch.length)


def _tensors_of_mlp(channel: MLP, layer: Layer, model: ModelSpec) -> Iterator[Weights]:
    width, inner, bias = model.width, channel.width, channel.bias
    for name in ("up", "gate") if channel.is_gated else ("up",):
        yield from _adapted(model, name, "mlp", width, inner, is_column=True, bias=bias)
    yield from _adapted(model, "down", "mlp", inner, width, is_column=False, bias=bias)


def _kept_by_mlp(channel: MLP, layer: Layer, setup: Setup, is_compiled: bool, device: str) -> int:
    """Return the bytes per token of a feed-forward block: outputs of projections and activation.

    A compiled layer stores the inputs of matrix products and what they return, and computes the activation
    from them again. Of an activation without stored tensors, it stores where the input is positive.
    """
    kept = ACTIVATION_FACTS[channel.activation.replace("gelu_tanh", "gelu")].kept_tensors
    size, run = setup.element_bytes, setup.run
    if is_compiled:
        each = 3 * size if channel.is_gated else 2 * size if kept else size + 1
        return each * channel.width
    tensors = kept + 1
    if channel.is_gated:
        # A kernel keeps none but up, gate and the product. With glu_fusion: auto a trial decides, as above.
        fuses = run.fusions.glu is True
        kept += 0 if channel.is_plain else 4  # Both clamped, the sum with the offset, and the gate's product.
        tensors = 2 if run.recomputation.recomputes_product(is_fused=fuses) else 3 if fuses else kept + 3
    return tensors * size * channel.width


def _tensors_of_experts(channel: Experts, layer: Layer, model: ModelSpec) -> Iterator[Weights]:
    """Yield the router, one tensor per matrix of all experts, and the expert for all tokens."""
    width = model.width
    yield Weights("experts", channel.number * width, multiplies=True, row=width)
    if channel.logits_bias:
        yield Weights("experts", channel.number)
    for name in ("up", "gate", "down") if channel.is_gated else ("up", "down"):
        sides = (channel.width, width) if name == "down" else (width, channel.width)
        for tensor in _adapted(model, name, "experts", *sides, is_column=name != "down", bias=False):
            stack = tensor._replace(
                numbers=channel.number * tensor.numbers,
                active=channel.chosen * tensor.numbers,
                matrices=channel.number,
            )
            # The dimension that is split is not the first.
            yield stack._replace(row=channel.number * tensor.row) if stack.splits_columns else stack
        if channel.biases:
            row = width if name == "down" else channel.width
            active = channel.chosen * row
            yield Weights("experts", channel.number * row, is_split=name != "down", active=active)
    if channel.shared is not None:
        for tensor in _tensors_of_mlp(channel.shared, layer, model):
            yield tensor._replace(part="experts") if tensor.part != ADAPTERS else tensor
    if channel.shared_gate:
        yield Weights("experts", width, multiplies=True, row=width)


def _kept_by_experts(channel: Experts, layer: Layer, setup: Setup, is_compiled: bool, device: str) -> int:
    """Return the bytes per token of a mixture.

    For each expert of a token: its input, what an MLP stores, its output and the place of its row. Of the
    router: its input in float32, scores, and their gradient of a balancing loss.
    """
    plain = ACTIVATION_FACTS[channel.activation.replace("gelu_tanh", "gelu")].kept_tensors
    tensors = plain + (3 if channel.is_gated else 1) + (0 if channel.is_plain else 4)
    size, ranks, width = setup.element_bytes, setup.run.layout.tensor, setup.model.width
    # The caller divides by the number of ranks what they split.
    places = 16 + (size * channel.number if channel.biases else 0)
    rows = channel.chosen * (tensors * size * channel.width + (2 * size * width + places) * ranks)
    # The caller counts the input, which is stored in float32 instead, unless the shared expert has it, too.
    is_counted = not setup.gathers_again and (size == 4 or channel.shared is None)
    router = ((4 - size * is_counted) * width + 8 * channel.number) * ranks
    shared = 0 if channel.shared is None else _kept_by_mlp(channel.shared, layer, setup, is_compiled, device)
    return rows + router + shared + (size * width * ranks if channel.shared_gate else 0)


def _tensors_of_spatial(mixer: SpatialMLP, layer: Layer, model: ModelSpec) -> Iterator[Weights]:
    """Yield two projections, the norm and the matrix of the gate, and a projection; amlp adds attention."""
    width, inner = model.width, mixer.width
    for _ in range(2):
        yield from _linear("mlp", width, inner, is_column=True, bias=mixer.bias)
    yield norm_weights(layer.norm, inner)
    yield Weights("mlp", mixer.length**2, row=mixer.length)
    yield Weights("mlp", mixer.length)
    yield from _linear("mlp", inner, width, is_column=False, bias=mixer.bias)
    if mixer.attention_width is not None:
        attended, bias = mixer.attention_width, mixer.attention_bias
        yield from _linear("attention", inner, 3 * attended, is_column=False, bias=bias)
        yield from _linear("attention", inner, 3 * attended, is_column=False, bias=False)
        yield from _linear("attention", attended, inner, is_column=True, bias=bias)


def _operations_of_spatial(mixer: SpatialMLP, model: ModelSpec, length: int, convention: Convention) -> int:
    positions = _counted(model, length, length, convention)
    return round(4 * positions * (mixer.width // 2 + (mixer.attention_width or 0)))


def _kept_by_spatial(mixer: SpatialMLP, layer: Layer, setup: Setup, is_compiled: bool, device: str) -> int:
    """Return the bytes per token of both halves of the output of the input projections, and what follows.

    The activation of one is an input of the product, that of the other of a norm; normed, mixed, and the
    product.
    """
    size, width = setup.element_bytes, mixer.width
    if is_compiled:
        return 5 * size * width
    return 6 * size * width + kept_by_norm(layer.norm, width, size, device, is_compiled=False)


def _messages_of_spatial(
    mixer: SpatialMLP, layer: Layer, model: ModelSpec, size: int, tokens: int
) -> _Messages:
    """Return the messages of the channels that the inner norm needs, and of the small attention."""
    per_channel = size // model.width
    forward = [Message("all_gather_into_tensor", mixer.width * per_channel)]
    backward = list(forward)
    if mixer.attention_width is not None:
        forward += [Message("all_reduce", 3 * mixer.attention_width * per_channel)] * 2
        backward.append(Message("all_reduce", mixer.attention_width * per_channel))
    return forward, backward


_COSTS: Mapping[type[Any], Cost] = {
    Attention: Cost(
        tensors=_tensors_of_attention,
        kept=_kept_by_attention,
        bias=lambda mixer: mixer.output_bias,
        operations=_operations_of_attention,
        scores=_scores,
        messages=_messages_of_attention,
        partial=_partial_of_attention,
    ),
    MLP: Cost(tensors=_tensors_of_mlp, kept=_kept_by_mlp, bias=lambda channel: channel.bias),
    Experts: Cost(
        tensors=_tensors_of_experts,
        kept=_kept_by_experts,
        bias=lambda channel: False,
        partial=lambda channel, layer, model: (
            channel.number * model.width,
            *([channel.number] if channel.logits_bias else []),
            *([channel.number * model.width] if channel.biases else []),
            *([model.width] if channel.shared_gate else []),
        ),
        exchanged=lambda channel: channel.chosen,
    ),
    SpatialMLP: Cost(
        tensors=_tensors_of_spatial,
        kept=_kept_by_spatial,
        bias=lambda mixer: mixer.bias,
        operations=_operations_of_spatial,
        messages=_messages_of_spatial,
        partial=lambda mixer, layer, model: (mixer.length**2, mixer.length),
    ),
}
