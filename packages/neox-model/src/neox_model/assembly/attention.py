"""Build the attention of layers, and the position embeddings."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from neox_config.facts.attention import attention_type
from neox_config.spec.model import Alibi, Attention, Embedding, Layer, Learned, Norm, Rotary, Rpe, Sinusoidal
from neox_config.spec.run import Batch, Fusions, RunSpec
from neox_model.assembly.norms import build_head_norms
from neox_model.assembly.operators import Operators
from neox_model.assembly.patterns import build_pattern
from neox_model.initialization import INIT_METHODS
from neox_model.layers.attention import (
    DenseCore,
    DocumentMasks,
    FlexCore,
    FlexScoresCore,
    ParallelAttention,
    SoftmaxCore,
)
from neox_model.layers.attention.flex import FlexBase
from neox_model.layers.positions import (
    AlibiPosition,
    BucketPosition,
    LearnedPosition,
    RotaryPosition,
    RotaryTables,
    SinusoidalPosition,
)
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import InitMethod
from neox_model.parallel.low_rank import LowRank

__all__ = [
    "ADDED_POSITIONS",
    "BIASES",
    "ROTATIONS",
    "build_attention",
    "build_input_position",
    "log_attention_paths",
]

logger = logging.getLogger(__name__)

Factory = Callable[[], nn.Module]


# Classes of positions -> functions that return factories of modules.
ADDED_POSITIONS: Mapping[type[Any], Callable[..., Factory]] = {
    # (position, width, initialization, tensor-parallel ranks)
    Learned: lambda position, width, init, group: partial(
        LearnedPosition,
        num_positions=position.count,
        hidden_size=width,
        init=init,
        offset=position.offset,
        group=group,
    ),
    Sinusoidal: lambda position, width, init, group: partial(SinusoidalPosition, hidden_size=width),
}
ROTATIONS: Mapping[type[Any], Callable[..., Factory]] = {
    # (position, attention, operators, tokens of a sequence, tables)
    Rotary: lambda position, mixer, operators, length, tables: partial(
        RotaryPosition,
        head_width=mixer.head_width,
        fraction=position.fraction,
        base=position.base,
        scaling=dict(position.scaling),
        operator=operators.rotary,
        splitting=operators.split_rotary,
        length=length,
        tables=tables.setdefault((mixer.head_width, position), RotaryTables()),
    ),
}
BIASES: Mapping[type[Any], Callable[..., Factory]] = {
    # (position, attention, tensor-parallel ranks)
    Alibi: lambda position, mixer, group: partial(AlibiPosition, heads=mixer.heads, group=group),
    Rpe: lambda position, mixer, group: partial(
        BucketPosition,
        num_buckets=position.buckets,
        max_distance=position.max_distance,
        heads=mixer.heads,
        head_width=mixer.head_width,
        both_ways=position.both_ways,
        init=INIT_METHODS["xavier_normal"](0.0, mixer.head_width, 1),
        group=group,
    ),
}


def build_input_position(embedding: Embedding, width: int, init: InitMethod, group: Group) -> Factory | None:
    """Return a factory of the position embedding that is added to the input; None if there is none."""
    return _position(ADDED_POSITIONS, embedding.position, width, init, group)


def _position(
    rows: Mapping[type[Any], Callable[..., Factory]], position: Any, *arguments: Any
) -> Factory | None:
    """Return a factory of a position embedding if there is a row for its class, else None."""
    row = rows.get(type(position))
    return None if row is None else row(position, *arguments)


def build_attention(
    mixer: Attention,
    layer_index: int,
    run: RunSpec,
    *,
    width: int,
    init: InitMethod,
    output_init: InitMethod,
    group: Group,
    operators: Operators,
    adapters: Mapping[str, LowRank],
    masks: DocumentMasks | None = None,
    gate_init: InitMethod | None = None,
    norm: Norm | None = None,
    tables: dict[Any, RotaryTables] | None = None,
) -> Factory:
    """Return a factory of the attention of one layer.

    Args:
        mixer: the attention.
        layer_index: index of the layer, from 0.
        run: how the model runs.
        width: channels between layers.
        init: initialization of the query-key-value projection.
        output_init: initialization of the output projection.
        group: the ranks over which the heads are split.
        operators: the operators that the layer calls.
        adapters: low-rank adapters by the name of their matrix.
        masks: masks of documents that the layers share; None: the layer makes its own.
        gate_init: initialization of the gate; None: as the query-key-value projection.
        norm: the norm of the layer, of whose kind those of queries and keys are; None: leave these out.
        tables: rotary tables that layers with the same rotation share, to which it adds; None: as `masks`.
    """
    tables = {} if tables is None else tables
    return partial(
        ParallelAttention,
        width,
        mixer.heads,
        head_width=mixer.head_width,
        key_value_heads=mixer.kv_heads,
        core=_core(mixer, layer_index, run, group, operators, masks),
        recomputes_core=run.recomputation.attention,
        init=init,
        output_init=output_init,
        position=_position(ROTATIONS, mixer.position, mixer, operators, run.batch.length, tables),
        qk_norm=build_head_norms(mixer, norm, group),
        qkv_bias=mixer.qkv_bias,
        output_bias=mixer.output_bias,
        gate_width=mixer.gate_width,
        gate_init=gate_init,
        # A norm that adds the output to the residual does not add its bias.
        skip_bias=operators.bias_dropout_add is not None and operators.norm_of_sum is None,
        group=group,
        adapters=adapters,
    )


def _core(
    mixer: Attention,
    layer_index: int,
    run: RunSpec,
    group: Group,
    operators: Operators,
    masks: DocumentMasks | None,
) -> Factory:
    core, _ = _path(mixer, run.batch, run.fusions, operators)
    options: dict[str, Any] = {
        "scale": mixer.scale,
        "pattern": build_pattern(mixer, layer_index, length=run.batch.length, group=group),
        "position": _position(BIASES, mixer.position, mixer, group),
        "is_causal": not mixer.both_ways,
        "dropout": run.dropout.attention,
        "group": group,
    }
    if issubclass(core, FlexBase):
        options["masks"] = masks
    if issubclass(core, SoftmaxCore):
        options["softmax"] = operators.softmax
        options["head_width"] = mixer.head_width
        options["softcap"] = mixer.softcap
        options["sinks"] = mixer.heads if mixer.sinks else 0
        options["coefficient"] = max(1, layer_index) if run.fusions.scales_by_layer else 1
    return partial(core, **options)


def _path(
    mixer: Attention, batch: Batch, fusions: Fusions, operators: Operators
) -> tuple[type[nn.Module], str]:
    """Return the attention core for a kind of attention, and the reason for the log."""
    if operators.softmax is not None:
        return SoftmaxCore, _why_scores_are_made(mixer.changes_scores, fusions, operators.flex_unusable)
    position, is_hidden = mixer.position, mixer.pattern_within(batch.length) is not None
    is_global = attention_type(mixer.kind) == "global"
    needs = {
        f"{mixer.kind} attention": not is_global,
        "sliding-window-width": is_global and is_hidden,
        f"pos-emb: {type(position).__name__.lower()}": type(position) in BIASES,
        "reset-attention-mask": batch.resets_attention,
        "padding": batch.has_padding,
        **dict.fromkeys(mixer.changes_scores, True),
    }
    asked = " and ".join(name for name, is_needed in needs.items() if is_needed)
    if not asked:
        direction = "to all tokens" if mixer.both_ways else "with is_causal"
        return DenseCore, f"PyTorch's scaled_dot_product_attention {direction}"
    if operators.flex_unusable is None:
        core = FlexScoresCore if mixer.changes_scores else FlexCore
        return core, f"FlexAttention with compiled block masks, for {asked}"
    return DenseCore, (
        f"PyTorch's scaled_dot_product_attention with a mask of queries by keys, for {asked}; not "
        f"FlexAttention, because {operators.flex_unusable}"
    )


def _why_scores_are_made(lacks: tuple[str, ...], fusions: Fusions, why_not_flex: str | None) -> str:
    asked = {
        "onnx-safe": fusions.is_for_export,
        "apply-query-key-layer-scaling": fusions.scales_by_layer,
        "scaled-upper-triang-masked-softmax-fusion": fusions.causal_softmax is True,
        "scaled-masked-softmax-fusion": fusions.masked_softmax is True,
    }
    names = " and ".join(name for name, is_asked in asked.items() if is_asked)
    if not names:
        names = " and ".join(lacks)
        return f"softmax of stored scores, for {names}; not FlexAttention, because {why_not_flex}"
    return f"softmax of stored scores, for {names}; without it PyTorch's attention is used, which is faster"


def log_attention_paths(
    layers: Sequence[Layer], batch: Batch, fusions: Fusions, operators: Operators
) -> None:
    """Log once how each kind of attention in the model is computed, and why."""
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    ways = Counter((mixer.kind, _path(mixer, batch, fusions, operators)[1]) for mixer in mixers)
    for (kind, reason), count in ways.items():
        logger.info("attention of %d %s layer%s: %s", count, kind, "s" if count > 1 else "", reason)
