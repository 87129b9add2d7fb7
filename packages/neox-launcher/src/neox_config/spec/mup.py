"""Maximal update parametrization (muP): what the sizes of a model change in it, and in its training.

All of it follows from the model and the sizes of its base: nothing else knows that a run uses muP. Three
factors are fields of the model (`with_factors`): scales of embeddings, attention scores and logits. The rest
is a row of `Multipliers` per kind of weight (`read_multipliers`), which initialization and optimizer read.

What CompleteP adds, 1/L of the residual branches, is in the weights that write to the residual stream: they
start, and are updated, 1/L times as large. For Adam, Lion and Muon this is the same training (in exact
arithmetic, without clipping) as a factor behind them, and every format stores such a model.

Sources: arXiv:2203.03466, tables 3 and 8; arXiv:2505.01618, table 1 (depth, epsilon); arXiv:2310.17813
(spectral condition: Muon).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt

from neox_config.derive.optimizer_arguments import optimizer_facts, own_arguments
from neox_config.derive.widths import head_width, mlp_width
from neox_config.facts.optimizers import MUON_SCALES, WidthRule
from neox_config.schema.config import NeoXConfig
from neox_config.spec.model import Attention, ModelSpec, Vocabulary
from neox_config.spec.run import Multipliers

__all__ = ["base_shapes", "initial_sizes", "read_multipliers", "with_factors"]

_NAMES = ("hidden_size", "num_attention_heads", "head_dim", "mlp_width", "num_layers")


def base_shapes(config: NeoXConfig, *, of_this_model: bool = False) -> dict[str, int]:
    """Return the sizes of the base model by name; where one is not given, that of this model.

    Args:
        config: a configuration.
        of_this_model: return the sizes of this model, to make it the base of others.
    """
    model = config.model
    own = (
        *(model.hidden_size, model.num_attention_heads, head_width(config)),
        *(mlp_width(config), model.num_layers),
    )
    found = dict(zip(_NAMES, own, strict=True))
    given = {} if of_this_model else config.mup.mup_base.model_dump(exclude_none=True)
    return found | given


def initial_sizes(config: NeoXConfig) -> tuple[int, int]:
    """Return width and depth that init methods are computed for: with muP, those of the base model."""
    shapes = base_shapes(config, of_this_model=not config.mup.use_mup)
    return shapes["hidden_size"], shapes["num_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    """How many times as large a model is as its base: each dimension, and its depth."""

    width: float
    query: float
    head: float
    inner: float
    depth: float

    @classmethod
    def of(cls, config: NeoXConfig) -> "_Growth":
        own, base = base_shapes(config, of_this_model=True), base_shapes(config)
        ratio = {name: own[name] / base[name] for name in _NAMES}
        return cls(
            width=ratio["hidden_size"],
            query=ratio["num_attention_heads"] * ratio["head_dim"],
            head=ratio["head_dim"],
            inner=ratio["mlp_width"],
            depth=ratio["num_layers"],
        )


def with_factors(model: ModelSpec, config: NeoXConfig) -> ModelSpec:
    """Return a model with the factors of muP, which multiply those that were given for the base model."""
    mup, head = config.mup, model.head
    if not mup.use_mup or not isinstance(head, Vocabulary):
        return model
    grows, base_head = _Growth.of(config), base_shapes(config)["head_dim"]

    def scaled(mixer: Attention) -> Attention:
        # Queries and keys become alike: a product over n channels is of size n, not sqrt(n).
        usual = base_head**-0.5 if mixer.scale is None else mixer.scale
        scale = usual / (grows.head * mup.mup_attn_temp)
        return replace(mixer, scale=None if scale == mixer.head_width**-0.5 else scale)

    return replace(
        model,
        embedding=replace(model.embedding, scale=model.embedding.scale * mup.mup_embedding_mult),
        layers=tuple(
            replace(layer, mixer=scaled(layer.mixer)) if isinstance(layer.mixer, Attention) else layer
            for layer in model.layers
        ),
        head=replace(head, scale=head.scale / (grows.width * mup.mup_output_temp)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """One kind of weight.

    Args:
        rows: how many times as many outputs it has.
        columns: how many times as many inputs; None: their number is not one of the sizes that grow.
        factor: the weight holds a factor that stands behind it otherwise.
        in_layer: it is in a layer, of which there are more in a deeper model.
        spectral: multiple of Muon's learning rate.
    """

    rows: float
    columns: float | None = None
    factor: float = 1.0
    in_layer: bool = True
    spectral: float = 1.0


# Rule of an optimizer -> how many times as large the learning rate of a weight is as in the base model, and
# the power of the weight's own factor in it. A gradient is as small as a layer is wide and as the model is
# deep: SGD's steps are in proportion to it, Adam's and Lion's do not depend on its size.
_RATES: Mapping[WidthRule, tuple[Callable[[_Weight, float], float], int]] = {
    "signs": (lambda weight, depth: 1 / (weight.columns or 1), 1),
    "gradients": (
        lambda weight, depth: weight.rows / (weight.columns or 1) * (depth if weight.in_layer else 1),
        2,
    ),
    "spectral": (lambda weight, depth: weight.spectral, 1),
}


def read_multipliers(config: NeoXConfig, model: ModelSpec) -> Mapping[str, Multipliers]:
    """Return the multipliers of each kind of weight; empty without muP.

    Kinds are those that `logical_parameter` is given, `other` for weights that muP leaves alone. Weights
    without a kind are `layer_vector` in layers, and `vector` outside them.
    """
    if not config.mup.use_mup:
        return {}
    rule = optimizer_facts(config).width_rule
    assert rule is not None, "a rule refuses other optimizers"
    depth = _Growth.of(config).depth
    return {kind: _multipliers(weight, rule, depth, config) for kind, weight in _weights(config, model)} | {
        "other": Multipliers()
    }


def _weights(config: NeoXConfig, model: ModelSpec) -> Iterator[tuple[str, _Weight]]:
    mup, grows, first = config.mup, _Growth.of(config), model.layers[0]
    assert isinstance(first.mixer, Attention), "a rule refuses other mixers"
    assert first.channel is not None, "attention does not mix channels"
    width, query, inner, branch = grows.width, grows.query, grows.inner, 1 / grows.depth
    yield "vocabulary", _Weight(rows=width, in_layer=False)
    position = mup.mup_embedding_mult * mup.mup_rp_embedding_mult
    yield "position", _Weight(rows=width, factor=position, in_layer=False)
    yield "vector", _Weight(rows=width, in_layer=False)
    yield "layer_vector", _Weight(rows=width)
    mixer, inner_size, muon = first.mixer, first.channel.width, own_arguments(config)
    # (how many times as many rows and columns as in the base model, rows and columns)
    sizes = {
        "qkv": (query, width, mixer.query_width + 2 * mixer.key_width, model.width),
        "dense": (width, query, model.width, mixer.query_width),
        "up": (inner, width, inner_size, model.width),
        "down": (width, inner, model.width, inner_size),
    }
    # What Muon makes orthogonal, where that is not the whole matrix.
    parts = {
        "separate": {"qkv": (query, width, mixer.query_width, model.width)},
        "per_head": {"qkv": (grows.head, width, mixer.head_width, model.width)},
    }
    orthogonal = sizes | parts.get(muon.get("qkv", ""), {})
    scale = MUON_SCALES[muon.get("scale", "original")]
    for kind, (rows, columns, _, _) in sizes.items():
        factor = branch if kind in ("dense", "down") else 1.0
        spectral = _spectral_rate(*orthogonal[kind], scale)
        yield kind, _Weight(rows=rows, columns=columns, factor=factor, spectral=spectral)
        yield f"{kind}_bias", _Weight(rows=rows, factor=factor)


def _spectral_rate(
    more_rows: float, more_columns: float, rows: int, columns: int, scale: Callable[[float, float], float]
) -> float:
    """Return the factor with which steps of Muon change outputs as in the base model.

    A step with the singular values s changes them by s * sqrt(inputs / outputs). Muon's s is `scale`.
    """
    of_base = scale(rows / more_rows, columns / more_columns)
    return sqrt(more_rows / more_columns) * of_base / scale(rows, columns)


def _multipliers(weight: _Weight, rule: WidthRule, depth: float, config: NeoXConfig) -> Multipliers:
    of_rule, power = _RATES[rule]
    rate = of_rule(weight, depth) * weight.factor**power
    layers = depth if weight.in_layer else 1.0
    is_muons = rule == "spectral" and weight.columns is not None
    return Multipliers(
        rows=1.0 if weight.columns is None else weight.rows,
        columns=weight.rows if weight.columns is None else weight.columns,
        std=config.mup.mup_init_scale * weight.factor / sqrt(weight.columns or 1),
        rate=rate,
        decay=1 / rate,
        # Muon's matrices have a size of their own.
        epsilon=1.0 if is_muons else 1 / (weight.rows * layers * weight.factor),
        reason=_reason(weight),
    )


def _reason(weight: _Weight) -> str:
    sums = "sums no more inputs" if weight.columns is None else f"sums {weight.columns:g} times the inputs"
    return sums if weight.factor == 1 else f"{sums}, and holds the factor {weight.factor:g}"
