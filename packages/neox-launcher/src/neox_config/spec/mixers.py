"""What mixes the tokens of a layer, and then its channels: from the parameters and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from neox_config.derive.attention_layers import has_qkv_bias
from neox_config.derive.experts import expert_scores, expert_width
from neox_config.derive.objective import sees_later_tokens
from neox_config.derive.widths import head_width, mlp_width
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.attention import AttentionSection
from neox_config.schema.sections.model import ModelSection
from neox_config.spec.patterns import Pattern, Window, read_pattern
from neox_config.spec.positions import AttentionPosition, read_position
from neox_config.spec.values import of

__all__ = ["MLP", "Attention", "Experts", "Mixer", "SpatialMLP", "read_mixer"]

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention over heads.

    Args:
        kind: its name in attention_config, for messages.
        heads: query heads.
        kv_heads: key and value heads.
        head_width: channels of a head.
        pattern: which keys a query sees; None: all, or all earlier ones.
        both_ways: queries see later tokens, too.
        position: what attention knows about positions; None: nothing.
        qk_norm: norms of queries and keys, of the layer's kind; head: of each head, and heads share their
            weights; width: of all heads together; shared: GPT-NeoX's, one norm for both; None: none.
        qkv_bias: the query-key-value projection has a bias.
        output_bias: the output projection has a bias.
        scale: what multiplies products of queries and keys; None: head_width ** -0.5.
        softcap: limit of scaled scores, as softcap * tanh(scores / softcap); None: they have none.
        sinks: the softmax of each head has a learned score without a value.
        gate: results are multiplied by the sigmoid of a projection of the input, one number per head, or per
            channel of each (element).
    """

    kind: str = of("attention_config", compare=False)
    heads: int = of("num_attention_heads")
    kv_heads: int = of("num_kv_heads", "num_attention_heads")
    head_width: int = of("head_dim", "hidden_size", "num_attention_heads")
    pattern: Pattern | None = of("sliding_window_width", "attention_config")
    both_ways: bool = of("objective", "sparsity_config.attention")
    position: AttentionPosition | None = of("pos_emb")
    qk_norm: Literal["head", "width", "shared"] | None = of("qk_norm", "use_qk_layernorm", default=None)
    qkv_bias: bool = of("use_bias_in_qkv", "use_bias_in_attn_linear")
    output_bias: bool = of("use_bias_in_attn_linear")
    scale: float | None = of("attention_scale", default=None)
    softcap: float | None = of("attention_softcap", default=None)
    sinks: bool = of("attention_sinks", default=False)
    gate: Literal["none", "head", "element"] = of("attention_gate", default="none")

    def pattern_within(self, length: int) -> Pattern | None:
        """Return the pattern, without a sliding window into which sequences of this length fit."""
        pattern = self.pattern
        if isinstance(pattern, Window) and pattern.block == 1 and pattern.before >= length - 1:
            return None
        return pattern

    @property
    def key_width(self) -> int:
        """Width of all key heads, which is also that of all value heads."""
        return self.head_width * self.kv_heads

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.head_width * self.heads

    @property
    def qk_norm_widths(self) -> Mapping[str, int]:
        """Number of channels of each norm of queries and keys, by its name."""
        widths: Mapping[str | None, dict[str, int]] = {
            "head": {"query": self.head_width, "key": self.head_width},
            "width": {"query": self.query_width, "key": self.key_width},
            "shared": {"both": self.query_width},
        }
        return widths.get(self.qk_norm, {})

    @property
    def gate_width(self) -> int:
        """Outputs of the projection of the gate."""
        return {"none": 0, "head": self.heads, "element": self.query_width}[self.gate]

    @property
    def changes_scores(self) -> tuple[str, ...]:
        """Options that PyTorch's scaled_dot_product_attention does not compute."""
        used = {"attention-softcap": self.softcap is not None, "attention-sinks": self.sinks}
        return tuple(name for name, is_used in used.items() if is_used)

    @classmethod
    def read(cls, config: NeoXConfig, kind: str, layer_index: int) -> Self:
        """Return the mixer of a layer of an attention type."""
        model, attention = config.model, config.attention
        position, width = read_position(config, layer_index), head_width(config)
        return cls(
            kind=kind,
            heads=model.num_attention_heads,
            kv_heads=model.num_kv_heads or model.num_attention_heads,
            head_width=width,
            pattern=read_pattern(config, kind),
            both_ways=sees_later_tokens(config, kind),
            position=position if isinstance(position, AttentionPosition) else None,
            qk_norm=_qk_norm(config.attention),
            qkv_bias=has_qkv_bias(config),
            output_bias=model.use_bias_in_attn_linear,
            scale=None if attention.attention_scale == width**-0.5 else attention.attention_scale,
            softcap=attention.attention_softcap,
            sinks=attention.attention_sinks,
            gate=attention.attention_gate,
        )

    def settings(self) -> Settings:
        """Return the parameters that give it."""
        settings: Settings = {
            "num-attention-heads": self.heads,
            "head-dim": self.head_width,
            "use-bias-in-attn-linear": self.output_bias,
        }
        if self.qkv_bias != self.output_bias:
            settings["use-bias-in-qkv"] = self.qkv_bias
        if self.kv_heads != self.heads:
            settings["num-kv-heads"] = self.kv_heads
        if self.qk_norm == "shared":
            settings["use-qk-layernorm"] = True
        elif self.qk_norm is not None:
            settings["qk-norm"] = self.qk_norm
        for name, neutral in (("scale", None), ("softcap", None), ("sinks", False), ("gate", "none")):
            if getattr(self, name) != neutral:
                settings[f"attention-{name}"] = getattr(self, name)
        return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialMLP:
    """The whole of a gMLP layer: two projections, a gate over positions, and a projection (arXiv:2105.08050).

    Args:
        kind: its name in attention_config, for messages.
        width: inner width of each of the two input projections.
        length: number of positions of the gate's matrix.
        attention_width: width of the small attention head of amlp layers; None: there is none.
        both_ways: tokens see later ones.
        activation: as in `MLP`.
        bias: the projections have biases.
        attention_bias: the projections of the small attention have biases.
    """

    kind: str = of("attention_config", compare=False)
    width: int = of("hidden_size")
    length: int = of("seq_length")
    attention_width: int | None = of("gmlp_attn_dim")
    both_ways: bool = of("objective", "sparsity_config.attention")
    activation: str = of("activation", "openai_gelu")
    bias: bool = of("use_bias_in_mlp")
    attention_bias: bool = of("use_bias_in_attn_linear")

    @classmethod
    def read(cls, config: NeoXConfig, kind: str, layer_index: int) -> Self:
        """Return the mixer of a layer of an attention type."""
        model = config.model
        return cls(
            kind=kind,
            width=4 * model.hidden_size,
            length=model.seq_length,
            attention_width=model.gmlp_attn_dim if ATTENTION_FACTS[kind].has_inner_attention else None,
            both_ways=sees_later_tokens(config, kind),
            activation=_activation(model),
            bias=model.use_bias_in_mlp,
            attention_bias=model.use_bias_in_attn_linear,
        )

    def settings(self) -> Settings:
        """Return the parameters that give it."""
        settings: Settings = {
            **_settings_of_activation(self.activation),
            "use-bias-in-mlp": self.bias,
            "use-bias-in-attn-linear": self.attention_bias,
        }
        if ATTENTION_FACTS[self.kind].has_inner_attention:
            settings["gmlp-attn-dim"] = self.attention_width
        return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class _Activated:
    """What is between the projections of feed-forward blocks.

    Args:
        activation: a key of `ACTIVATION_FACTS`, or gelu_tanh for the tanh form of gelu.
        limit: swiglu clamps the gate to at most it, and up to between it and its negative; None: it does not.
        alpha: swiglu multiplies the gate by it in the sigmoid.
        up_offset: swiglu adds it to up.
    """

    activation: str = of("activation", "openai_gelu")
    limit: float | None = of("glu_limit", default=None)
    alpha: float = of("glu_alpha", default=1.0)
    up_offset: float = of("glu_up_offset", default=0.0)

    @property
    def is_gated(self) -> bool:
        """True if there is a second input projection, whose output is activated and multiplied."""
        return ACTIVATION_FACTS[self.activation.replace("gelu_tanh", "gelu")].is_gated

    @property
    def is_plain(self) -> bool:
        """True if a gate is activated and multiplied, and no more."""
        return (self.limit, self.alpha, self.up_offset) == (None, 1.0, 0.0)

    def activation_settings(self) -> Settings:
        """Return the parameters that give these values."""
        clamps = {"glu-limit": self.limit, "glu-alpha": self.alpha, "glu-up-offset": self.up_offset}
        return _settings_of_activation(self.activation) | ({} if self.is_plain else clamps)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP(_Activated):
    """Two projections with an activation between them, or three with a gate.

    Args:
        width: width of each input projection.
        bias: the projections have biases.
    """

    width: int = of("mlp_width", "intermediate_size", "expansion_factor")
    bias: bool = of("use_bias_in_mlp")

    @classmethod
    def read(cls, config: NeoXConfig) -> Self:
        """Return the MLP of the layers."""
        model = config.model
        return cls(width=mlp_width(config), bias=model.use_bias_in_mlp, **_activated(model))

    def settings(self) -> Settings:
        """Return the parameters that give it."""
        return {
            "mlp-width": self.width,
            **self.activation_settings(),
            "use-bias-in-mlp": self.bias,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(_Activated):
    """A router, and feed-forward blocks, of which each token passes a few.

    Args:
        number: experts of the layer.
        chosen: experts of a token.
        width: width of each input projection of an expert.
        scores: the function of the router's logits; of the results the largest are chosen.
        normalized: the weights of a token's experts are divided by their sum.
        has_bias: a number per expert, which is no weight, is added to the scores for the choice alone.
        logits_bias: the router's logits have a bias.
        weight_scale: factor of the weights.
        groups: experts are chosen from some of as many groups of neighbors; 1: from all.
        top_groups: the number of these.
        biases: the projections of experts have biases; those of the expert for all tokens have none.
        shared_width: width of each input projection of an expert for all tokens; 0: there is none.
        shared_gate: the output of that is multiplied by the sigmoid of a projection of the input.
    """

    number: int = of("moe_num_experts")
    chosen: int = of("moe_top_k")
    width: int = of("moe_expert_width", "intermediate_size")
    scores: str = of("moe_scores", "moe_router_type")
    normalized: bool = of("moe_normalize_weights")
    has_bias: bool = of("moe_expert_bias")
    logits_bias: bool = of("moe_router_bias", default=False)
    weight_scale: float = of("moe_weight_scale", default=1.0)
    groups: int = of("moe_groups", default=1)
    top_groups: int = of("moe_top_groups", default=1)
    biases: bool = of("use_bias_in_experts", default=False)
    shared_width: int = of("moe_shared_width")
    shared_gate: bool = of("moe_shared_gate")

    @property
    def shared(self) -> MLP | None:
        """The expert for all tokens; None if there is none."""
        if not self.shared_width:
            return None
        return MLP(
            width=self.shared_width,
            activation=self.activation,
            bias=False,
            limit=self.limit,
            alpha=self.alpha,
            up_offset=self.up_offset,
        )

    @classmethod
    def read(cls, config: NeoXConfig) -> Self:
        """Return the experts of the layers that have them."""
        given = config.experts
        return cls(
            number=given.moe_num_experts,
            chosen=given.moe_top_k,
            width=expert_width(config),
            scores=expert_scores(config),
            normalized=given.moe_normalize_weights,
            has_bias=given.moe_expert_bias,
            logits_bias=given.moe_router_bias,
            weight_scale=given.moe_weight_scale,
            groups=given.moe_groups,
            top_groups=given.moe_top_groups if given.moe_groups > 1 else 1,
            biases=given.use_bias_in_experts,
            **_activated(config.model),
            shared_width=given.moe_shared_width,
            shared_gate=given.moe_shared_gate and given.moe_shared_width > 0,
        )

    def settings(self) -> Settings:
        """Return the parameters that give it, apart from the layers."""
        settings: Settings = {
            "moe-num-experts": self.number,
            "moe-top-k": self.chosen,
            "moe-expert-width": self.width,
            "moe-scores": self.scores,
            **self.activation_settings(),
        }
        others = {
            # What sinkhorn does not have.
            "moe-router-type": "topk" if self.has_bias or self.groups > 1 else None,
            "moe-normalize-weights": self.normalized,
            "moe-expert-bias": self.has_bias,
            "moe-router-bias": self.logits_bias,
            "moe-weight-scale": self.weight_scale != 1.0 and self.weight_scale,
            "moe-groups": self.groups > 1 and self.groups,
            "moe-top-groups": self.groups > 1 and self.top_groups,
            "use-bias-in-experts": self.biases,
            "moe-shared-width": self.shared_width,
            "moe-shared-gate": self.shared_gate,
        }
        return settings | {name: value for name, value in others.items() if value}


Mixer = Attention | SpatialMLP

# Attention type -> class; those that are not here are attention over heads.
_MIXERS: Mapping[str, type[Mixer]] = {"gmlp": SpatialMLP, "amlp": SpatialMLP}


def read_mixer(config: NeoXConfig, kind: str, layer_index: int) -> Mixer:
    """Return the mixer of a layer of an attention type, given the configuration for its kind."""
    return _MIXERS.get(kind, Attention).read(config, kind, layer_index)


def _qk_norm(section: AttentionSection) -> Literal["head", "width", "shared"] | None:
    if section.use_qk_layernorm:
        return "shared"
    return None if section.qk_norm == "none" else section.qk_norm


def _activated(model: ModelSection) -> dict[str, Any]:
    """Return the fields of `_Activated`; only swiglu is more than plain."""
    clamps = {"limit": model.glu_limit, "alpha": model.glu_alpha, "up_offset": model.glu_up_offset}
    return {"activation": _activation(model), **(clamps if model.activation == "swiglu" else {})}


def _activation(model: ModelSection) -> str:
    # bias_gelu_fusion implies the tanh form, even if "auto" does not choose the fused operator.
    is_tanh = model.activation == "gelu" and (model.openai_gelu or bool(model.bias_gelu_fusion))
    return "gelu_tanh" if is_tanh else model.activation


def _settings_of_activation(name: str) -> Settings:
    return {"activation": "gelu", "openai-gelu": True} if name == "gelu_tanh" else {"activation": name}
