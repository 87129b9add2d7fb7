"""The architecture of a model in terms that our configuration and other programs' configurations share.

Our configuration becomes an `Architecture` (`architecture_of`) and an `Architecture` becomes our
configuration (`settings_of`); a family does the same with its own configuration. Whatever one of the four
does not express is found by comparing an architecture with the one that comes back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from neox_config import NeoXConfig, Resolved
from neox_config.derive.attention_layers import has_qkv_bias
from neox_config.derive.objective import is_encoder
from neox_config.facts.attention import BIASED_SCORES
from neox_config.facts.norms import NORM_FACTS
from neox_config.problems import in_words

__all__ = ["Architecture", "Obstacle", "architecture_of", "differences", "obstacles_in", "settings_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Everything that determines the logits, except the weights and the number of entries.

    Args:
        num_layers: number of layers.
        hidden_size: width between layers.
        heads: query heads.
        kv_heads: key and value heads.
        mlp_width: width of each input matrix of the MLP.
        max_positions: longest sequence.
        activation: our name of the activation; "gelu" is the erf form, "gelu_tanh" the other.
        norm: our name of the norm.
        norm_epsilon: its constant.
        norm_bias: norms have a bias.
        positions: our name of the position embedding.
        rotary_fraction: fraction of a head's channels that is rotated; 1 without rotary embeddings.
        rotary_base: base of the frequencies; 10000 without rotary embeddings.
        rotary_scaling: our settings of scaled frequencies; empty if they are not scaled.
        windows: tokens that a token of each layer sees, including itself; None: all earlier ones.
        parallel_residual: attention and MLP read the same input.
        qkv_bias: the query-key-value projection has a bias.
        output_bias: the output projection of attention has a bias.
        mlp_bias: the projections of the MLP have biases.
        tied: the output projection is the token embedding.
    """

    num_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    mlp_width: int
    max_positions: int
    activation: str
    norm: str
    norm_epsilon: float
    norm_bias: bool
    positions: str
    rotary_fraction: float
    rotary_base: float
    rotary_scaling: Mapping[str, Any]
    windows: tuple[int | None, ...]
    parallel_residual: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool


@dataclass(frozen=True, slots=True)
class Obstacle:
    """An option that a family does not have.

    Args:
        option: our parameter.
        value: its value, in words.
        theirs: the family's value, in words; empty if there is none to compare with.
    """

    option: str
    value: str
    theirs: str = ""

    def __str__(self) -> str:
        return f"{self.option}: {self.value}" + (f" (there: {self.theirs})" if self.theirs else "")


_PARAMETERS: Mapping[str, str] = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "heads": "num-attention-heads",
    "kv_heads": "num-kv-heads",
    "mlp_width": "mlp-width",
    "max_positions": "max-position-embeddings",
    "activation": "activation",
    "norm": "norm",
    "norm_epsilon": "epsilon of the norm",
    "norm_bias": "use-bias-in-norms",
    "positions": "pos-emb",
    "rotary_fraction": "rotary-pct",
    "rotary_base": "rotary-emb-base",
    "rotary_scaling": "rotary-scaling",
    "windows": "tokens that each layer sees (attention-config, sliding-window-width)",
    "parallel_residual": "gpt-j-residual",
    "qkv_bias": "bias of query, key and value (use-bias-in-qkv, use-bias-in-attn-linear)",
    "output_bias": "bias of the output of attention (use-bias-in-attn-linear)",
    "mlp_bias": "use-bias-in-mlp",
    "tied": "weight tying (no-weight-tying)",
}


def differences(ours: Architecture, theirs: Architecture) -> list[Obstacle]:
    """Return the options in which two architectures differ."""
    return [
        Obstacle(_PARAMETERS[name], _in_words(one), _in_words(other))
        for name in (field.name for field in fields(Architecture))
        if (one := getattr(ours, name)) != (other := getattr(theirs, name))
    ]


def _in_words(value: Any) -> str:
    if isinstance(value, tuple):
        kinds = list(dict.fromkeys(value))
        return ", ".join("all" if kind is None else f"{kind:,}" for kind in kinds)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {in_words(each)}" for name, each in value.items()) or "none"
    return in_words(value)


def obstacles_in(resolved: Resolved) -> list[Obstacle]:
    """Return the options of a configuration for which `Architecture` has no field."""
    return list(_obstacles(resolved))


def _obstacles(resolved: Resolved) -> Iterator[Obstacle]:
    config = resolved.config
    if is_encoder(config):
        yield Obstacle("objective", config.model.objective, "causal")
    if config.model.num_unique_layers not in (None, config.model.num_layers):
        yield Obstacle("num-unique-layers", f"{config.model.num_unique_layers}")
    if config.model.apply_residual_connection_post_layernorm:
        yield Obstacle("apply-residual-connection-post-layernorm", "true")
    attention = config.attention
    if attention.apply_query_key_layer_scaling and attention.pos_emb in BIASED_SCORES:
        yield Obstacle(f"apply-query-key-layer-scaling with pos-emb: {attention.pos_emb}", "true")
    kinds = dict.fromkeys(resolved.derived.attention_types)
    for kind in kinds:
        if kind not in ("global", "local"):
            yield Obstacle("attention-config", kind)
    block = config.attention.sparsity_config.block
    if "local" in kinds and block != 1:
        yield Obstacle("sparsity-config.block of local layers", f"{block}", "1")


def architecture_of(resolved: Resolved) -> Architecture:
    """Return the architecture of a configuration, as far as `obstacles_in` lists nothing."""
    model, attention = resolved.config.model, resolved.config.attention
    is_rotary = attention.pos_emb == "rotary"
    is_tanh = model.activation == "gelu" and (model.openai_gelu or bool(model.bias_gelu_fusion))
    facts = NORM_FACTS[model.norm]
    return Architecture(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_kv_heads or model.num_attention_heads,
        mlp_width=resolved.derived.mlp_width,
        max_positions=model.max_position_embeddings,
        activation="gelu_tanh" if is_tanh else model.activation,
        norm="layernorm" if model.norm == "apexlayernorm" else model.norm,
        norm_epsilon=getattr(model, facts.epsilon),
        norm_bias=facts.has_bias and model.use_bias_in_norms,
        positions=attention.pos_emb,
        rotary_fraction=attention.rotary_pct if is_rotary else 1.0,
        rotary_base=float(attention.rotary_emb_base) if is_rotary else 10000.0,
        rotary_scaling=_scaling_of(resolved.config) if is_rotary else {},
        windows=tuple(_window(resolved.config, kind) for kind in resolved.derived.attention_types),
        parallel_residual=model.gpt_j_residual,
        qkv_bias=has_qkv_bias(resolved.config),
        output_bias=model.use_bias_in_attn_linear,
        mlp_bias=model.use_bias_in_mlp,
        tied=not model.no_weight_tying,
    )


def _scaling_of(config: NeoXConfig) -> dict[str, Any]:
    return config.attention.rotary_scaling.in_use(config.model.max_position_embeddings)


def _window(config: NeoXConfig, kind: str) -> int | None:
    """Return the number of tokens that a token of a layer sees; None if every sequence fits into it."""
    attention = config.attention
    if kind == "local":
        tokens = attention.sparsity_config.local_attention_blocks // 2 + 1
    elif attention.sliding_window_width is not None:
        tokens = attention.sliding_window_width + 1
    else:
        return None
    return None if tokens >= config.model.max_position_embeddings else tokens


def settings_of(architecture: Architecture) -> dict[str, Any]:
    """Return the parameters of our configuration that give an architecture."""
    is_tanh = architecture.activation == "gelu_tanh"
    settings: dict[str, Any] = {
        "num-layers": architecture.num_layers,
        "hidden-size": architecture.hidden_size,
        "num-attention-heads": architecture.heads,
        "mlp-width": architecture.mlp_width,
        "max-position-embeddings": architecture.max_positions,
        "seq-length": architecture.max_positions,
        "activation": "gelu" if is_tanh else architecture.activation,
        "norm": architecture.norm,
        NORM_FACTS[architecture.norm].epsilon.replace("_", "-"): architecture.norm_epsilon,
        "pos-emb": architecture.positions,
        "no-weight-tying": not architecture.tied,
        "use-bias-in-attn-linear": architecture.output_bias,
        "use-bias-in-mlp": architecture.mlp_bias,
    }
    if architecture.qkv_bias != architecture.output_bias:
        settings["use-bias-in-qkv"] = architecture.qkv_bias
    if is_tanh:
        settings["openai-gelu"] = True
    if NORM_FACTS[architecture.norm].has_bias:
        settings["use-bias-in-norms"] = architecture.norm_bias
    if architecture.kv_heads != architecture.heads:
        settings["num-kv-heads"] = architecture.kv_heads
    if architecture.parallel_residual:
        settings["gpt-j-residual"] = True
    if architecture.positions == "rotary":
        settings["rotary-pct"] = architecture.rotary_fraction
        settings["rotary-emb-base"] = _whole(architecture.rotary_base)
        if architecture.rotary_scaling:
            settings["rotary-scaling"] = dict(architecture.rotary_scaling)
    return settings | _window_settings(architecture.windows)


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _window_settings(windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the settings of layers that see a window of tokens: `local` attention in blocks of one token."""
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {}
    # The window of `local` is its own block and half of the number of blocks before it.
    blocks = max(1, 2 * (max(sizes) - 1))
    is_uniform = None not in windows
    kinds = (
        [[["local"], "all"]] if is_uniform else ["global" if each is None else "local" for each in windows]
    )
    return {"attention-config": kinds, "sparsity-config": {"block": 1, "num-local-blocks": blocks}}
