"""Attention types and position embeddings."""

from typing import Any, Literal

from pydantic import field_validator

from neox_config.facts.attention import (
    ATTENTION_FACTS,
    BLOCKS_OF_ENCODER,
    ROWS_OF_ENCODER,
    RPE_OF_ENCODER,
    WITH_HEADS,
    has_layers,
    layers_using,
)
from neox_config.facts.rotary import longrope_attention_factor, yarn_attention_factor
from neox_config.schema.parameter import Section, block, named_blocks, param
from neox_config.schema.sections.model import Fusion

__all__ = ["AttentionKind", "AttentionSection", "RotaryScaling", "SparsityConfig"]


_SCALES = "type is linear, llama3 or yarn"
_BY_LENGTH = "type is llama3, yarn or longrope"
_LLAMA3 = "type is llama3"
_YARN = "type is yarn"
_LONGROPE = "type is longrope"


class SparsityConfig(Section):
    """Block layouts of sparse attention layers."""

    mode: Literal["dense", "fixed", "bigbird", "bslongformer", "variable"] = param(
        "fixed", origin="DSC", resume="free", doc="Not used: attention-config sets the type of each layer."
    )
    block: int = param(
        16, origin="DSC", gt=0, le=1_000_000, doc="Block size in tokens; must divide seq-length."
    )
    different_layout_per_head: bool = param(
        False,
        origin="DSC",
        used_when=layers_using("different_layout_per_head"),
        doc="Use a different layout for each head. Requires several global patterns or random blocks.",
    )
    num_local_blocks: int = param(
        4, origin="DSC", gt=0, used_when=layers_using("num_local_blocks"), doc="Blocks per local window."
    )
    num_global_blocks: int = param(
        1,
        origin="DSC",
        gt=0,
        used_when=layers_using("num_global_blocks"),
        doc="Global blocks per window, which all later blocks attend to; bidirectional: all blocks.",
    )
    attention: Literal["unidirectional", "bidirectional"] = param(
        "bidirectional",
        origin="DSC",
        used_when=BLOCKS_OF_ENCODER,
        doc="Whether tokens of layers in blocks see later tokens, or only earlier ones. With objective: "
        "causal, all layers are unidirectional.",
    )
    horizontal_global_attention: bool = param(
        False,
        origin="DSC",
        used_when=ROWS_OF_ENCODER,
        doc="Let global blocks attend to all blocks; requires attention: bidirectional. Global blocks of "
        "bslongformer and bigbird always do.",
    )
    num_different_global_patterns: int = param(
        1,
        origin="DSC",
        gt=0,
        used_when=layers_using("num_different_global_patterns"),
        doc="Number of different choices of global blocks; heads alternate between them.",
    )
    num_random_blocks: int = param(
        0,
        origin="DSC",
        ge=0,
        used_when=layers_using("num_random_blocks"),
        doc="Random blocks per row of blocks.",
    )
    local_window_blocks: tuple[int, ...] = param(
        (4,),
        origin="DSC",
        used_when=layers_using("local_window_blocks"),
        doc="Sizes of successive local windows, in blocks; the last size repeats.",
    )
    global_block_indices: tuple[int, ...] = param(
        (0,),
        origin="DSC",
        used_when=layers_using("global_block_indices"),
        doc="Indices of the global blocks, or of the starts of ranges of global blocks.",
    )
    global_block_end_indices: tuple[int, ...] | None = param(
        None,
        origin="DSC",
        none_means="each index is one block",
        used_when=layers_using("global_block_end_indices"),
        doc="Ends (exclusive) of the ranges of global blocks.",
    )
    num_sliding_window_blocks: int = param(
        3,
        origin="DSC",
        gt=0,
        used_when=layers_using("num_sliding_window_blocks"),
        doc="Width of the sliding window in blocks, half of it before the current block and, if attention is "
        "bidirectional, half behind it. Local layers use it if num_local_blocks is not given.",
    )

    def can_differ_per_head(self, kind: str) -> bool:
        """Return True if different_layout_per_head gives heads different layouts.

        Args:
            kind: attention type of a layer.
        """
        uses = {
            "num_different_global_patterns": self.num_different_global_patterns > 1,
            "num_random_blocks": self.num_random_blocks > 0,
        }
        settings = ATTENTION_FACTS[kind].settings
        return "different_layout_per_head" in settings and any(uses.get(name, False) for name in settings)

    @property
    def local_attention_blocks(self) -> int:
        """Window of `local` attention in blocks: num_local_blocks, else num_sliding_window_blocks, else 4."""
        for name in ("num_local_blocks", "num_sliding_window_blocks"):
            if name in self.model_fields_set:
                return int(getattr(self, name))
        return 4

    @property
    def global_ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) pairs of the listed global blocks."""
        starts, stops = self.global_block_indices, self.global_block_end_indices
        if stops is None:
            return tuple((start, start + 1) for start in starts)
        return tuple(zip(starts, stops, strict=False))


class RotaryScaling(Section):
    """Rotary frequencies that are scaled to sequences longer than those of an earlier run."""

    type: Literal["none", "linear", "llama3", "yarn", "longrope"] = param(
        "none",
        origin="ours",
        used_when="pos_emb is rotary",
        source="arXiv:2306.15595 (linear), arXiv:2407.21783 (llama3), arXiv:2309.00071 (yarn), "
        "arXiv:2402.13753 (longrope)",
        doc="Formula. linear: all frequencies are divided by the factor. llama3 and yarn: low frequencies "
        "are divided by it, high ones are not, and those between are interpolated. longrope: each is "
        "divided by its own factor, of short_factor or long_factor.",
    )
    factor: float = param(
        1.0,
        origin="ours",
        ge=1,
        le=1_000_000,
        used_when=_SCALES,
        doc="Divisor of the scaled frequencies, usually the new length divided by the original one.",
    )
    original_max_position_embeddings: int | None = param(
        None,
        origin="ours",
        gt=0,
        le=1_000_000_000,
        none_means="max_position_embeddings",
        used_when=_BY_LENGTH,
        doc="Sequence length of the earlier run, in tokens.",
    )
    low_freq_factor: float = param(
        1.0,
        origin="ours",
        gt=0,
        used_when=_LLAMA3,
        doc="Wavelengths longer than the original length divided by this are scaled by the whole factor.",
    )
    high_freq_factor: float = param(
        4.0,
        origin="ours",
        gt=0,
        used_when=_LLAMA3,
        doc="Wavelengths shorter than the original length divided by this are not scaled.",
    )
    beta_fast: float = param(
        32.0,
        origin="ours",
        gt=0,
        used_when=_YARN,
        doc="Channels that turn at least this many times in the original length are not scaled.",
    )
    beta_slow: float = param(
        1.0,
        origin="ours",
        gt=0,
        used_when=_YARN,
        doc="Channels that turn at most this many times in the original length are scaled by the whole "
        "factor.",
    )
    truncate: bool = param(
        True, origin="ours", used_when=_YARN, doc="Round the limits between channels to whole channels."
    )
    attention_factor: float | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="0.1 * ln(factor) + 1; longrope: sqrt(1 + ln(maximum length / original) / ln(original))",
        used_when="type is yarn or longrope",
        doc="Multiplies sines and cosines, and so attention scores by its square.",
    )
    short_factor: tuple[float, ...] | None = param(
        None,
        origin="ours",
        none_means="there are none",
        used_when=_LONGROPE,
        doc="Divisors of the frequencies of sequences up to the original length: one per pair of rotated "
        "channels.",
    )
    long_factor: tuple[float, ...] | None = param(
        None,
        origin="ours",
        none_means="there are none",
        used_when=_LONGROPE,
        doc="Divisors of the frequencies of longer sequences. Training chooses by seq-length. Generation and "
        "scoring choose once for each request, by the most tokens that the model may read for it: those of "
        "the prompt and all new ones but the last. With and without a cache, and whatever else is in the "
        "batch, the choice is the same, and it does not change while tokens are generated.",
    )

    def in_use(self, max_position_embeddings: int) -> dict[str, Any]:
        """Return the settings that have an effect, with the meaning of null; empty without scaling."""
        original = self.original_max_position_embeddings or max_position_embeddings
        values: dict[str, Any] = {"type": self.type}
        if self.type != "longrope":
            values["factor"] = self.factor
        if self.type in ("llama3", "yarn", "longrope"):
            values["original_max_position_embeddings"] = original
        if self.type == "llama3":
            values |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.type == "yarn":
            values |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            values["attention_factor"] = self.attention_factor or yarn_attention_factor(self.factor)
        if self.type == "longrope":
            default = longrope_attention_factor(max_position_embeddings, original)
            values["attention_factor"] = self.attention_factor or default
            values |= {"short_factor": self.short_factor, "long_factor": self.long_factor}
        return {} if self.type == "none" else values


class RotaryScalingOfKind(RotaryScaling):
    """Scaling of the rotary frequencies of a kind of attention."""

    type: Literal["none", "linear", "llama3", "yarn", "longrope"] | None = param(  # type: ignore[assignment]
        None,
        origin="ours",
        none_means="rotary-scaling of the model",
        doc="Formula, as in rotary-scaling of the model, all of which it replaces.",
    )


class AttentionKind(Section):
    """A kind of global attention: what differs from the other parameters, under their names."""

    sliding_window_width: int | None = param(
        None,
        origin="ours",
        gt=0,
        le=1_000_000_000,
        none_means="sliding-window-width of the model",
        doc="Number of earlier tokens that a token sees, in addition to itself.",
    )
    pos_emb: Literal["rotary", "none"] | None = param(
        None,
        origin="ours",
        none_means="pos-emb of the model",
        doc="none: queries and keys are not rotated. Requires pos-emb: rotary of the model.",
    )
    rotary_emb_base: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="rotary-emb-base of the model",
        doc="Base of the geometric series of the rotation frequencies.",
    )
    rotary_scaling: RotaryScalingOfKind = block(
        RotaryScalingOfKind, origin="ours", doc="Scaling of the rotary frequencies."
    )

    def overrides(self) -> dict[str, Any]:
        """Return the parameters of the model with other values, by name."""
        given = {
            **{name: getattr(self, name) for name in type(self).model_fields if name != "rotary_scaling"},
            "rotary_scaling": self.rotary_scaling if self.rotary_scaling.type is not None else None,
        }
        return {name: value for name, value in given.items() if value is not None}


class AttentionSection(Section, resume="model"):
    """Attention types and position embeddings."""

    attention_config: tuple[Any, ...] | None = param(
        None,
        origin="NeoX",
        none_means="global attention in every layer",
        free_choice=", ".join(ATTENTION_FACTS),
        doc='Attention type of each layer. [[["global", "local"], 6]] repeats both types six times; with '
        '"all" '
        "instead of a count, the types repeat up to the last layer; a flat list has one entry per layer.",
    )
    attention_kinds: dict[str, AttentionKind] = named_blocks(
        "kind",
        origin="ours",
        doc="Kinds of global attention that differ in their window or in their rotary embeddings. "
        "attention-config has their names, in addition to the attention types.",
    )
    sliding_window_width: int | None = param(
        None,
        origin="NeoX",
        gt=0,
        le=1_000_000_000,
        none_means="every earlier token",
        used_when=has_layers(("global",)),
        doc="Number of earlier tokens that a token of a global layer sees, in addition to itself; with "
        "objective: masked also of later ones.",
    )
    attention_scale: float | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="1 / sqrt(head_dim)",
        used_when=WITH_HEADS,
        source="arXiv:1706.03762; arXiv:2408.00118 (another scale)",
        doc="Multiplies the products of queries and keys.",
    )
    attention_softcap: float | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="scores are not limited",
        used_when=WITH_HEADS,
        source="arXiv:2408.00118",
        doc="Limits the scaled attention scores to cap * tanh(scores / cap), before a bias of pos-emb is "
        "added. It requires FlexAttention, on GPUs, or stored scores.",
    )
    attention_sinks: bool = param(
        False,
        origin="ours",
        used_when=WITH_HEADS,
        source="arXiv:2309.17453; arXiv:2508.10925 (the learned form)",
        doc="Add to the softmax of each head a learned score that belongs to no token, so that the weights "
        "of all tokens can be small. It requires FlexAttention, on GPUs, or stored scores.",
    )
    attention_gate: Literal["none", "head", "element"] = param(
        "none",
        origin="ours",
        used_when=WITH_HEADS,
        source="arXiv:2505.06708",
        doc="Multiply the results of heads by the sigmoid of a projection of the layer's input, before the "
        "output projection: one number per head, or one per channel of each head.",
    )
    sparsity_config: SparsityConfig = block(
        SparsityConfig, origin="NeoX", doc="Block layouts of sparse attention layers."
    )
    pos_emb: Literal["learned", "rotary", "sinusoidal", "rpe", "alibi", "none"] = param(
        "learned",
        origin="NeoX",
        source="arXiv:2104.09864 (rotary), arXiv:1910.10683 (rpe), arXiv:2108.12409 (alibi)",
        doc="Position embedding.",
    )
    qk_norm: Literal["none", "head", "width"] = param(
        "none",
        origin="ours",
        source="arXiv:2302.05442",
        doc="Norms of queries and keys before rotary embeddings, of the kind that norm selects. head: over "
        "the channels of each head, with weights that all heads share, as in Qwen3. width: over the channels "
        "of all query heads, and of all key heads, with a weight per channel, as in OLMo 2.",
    )
    use_qk_layernorm: bool = param(
        False,
        origin="NeoX",
        source="arXiv:2302.05442",
        doc="GPT-NeoX's form of qk-norm: queries and keys have the same norm, with a weight per channel of "
        "each head. It is over the channels of all heads, those of rmsnorm and scalenorm over each head. "
        "Not available with fewer key-value heads than query heads.",
    )
    opt_pos_emb_offset: int = param(
        0,
        origin="NeoX",
        ge=0,
        le=1_000_000,
        used_when="pos_emb is learned",
        doc="Rows of the table of learned positions before that of the first position; 2 in OPT.",
    )
    rpe_num_buckets: int = param(
        32,
        origin="NeoX",
        gt=1,
        le=1_000_000,
        used_when="pos_emb is rpe",
        doc="Number of distance buckets, each with a learned bias per head.",
    )
    rpe_max_distance: int = param(
        128,
        origin="NeoX",
        gt=1,
        used_when="pos_emb is rpe",
        doc="Distances of this many tokens or more share the last bucket.",
    )
    rpe_causal: bool = param(
        False,
        origin="NeoX",
        used_when=RPE_OF_ENCODER,
        doc="Give all later tokens the bias of distance 0, as in T5's decoder. false: half of the buckets "
        "are for later tokens. With objective: causal, the bias is always that of a decoder.",
    )
    rotary_pct: float = param(
        1.0,
        origin="NeoX",
        ge=0,
        le=1,
        used_when="pos_emb is rotary",
        source="arXiv:2104.09864",
        doc="Fraction of each head's dimensions that is rotated; the rest is unchanged.",
    )
    rotary_emb_base: int = param(
        10000,
        origin="NeoX",
        gt=0,
        used_when="pos_emb is rotary",
        source="arXiv:2104.09864",
        doc="Base of the geometric series of the rotation frequencies.",
    )
    rotary_scaling: RotaryScaling = block(
        RotaryScaling, origin="ours", doc="Scaling of the rotary frequencies to longer sequences."
    )
    rope_fusion: Fusion = param(
        False,
        origin="NeoX",
        resume="free",
        used_when="pos_emb is rotary",
        doc="Apply rotary embeddings to queries and keys in one fused kernel; auto: where that is faster.",
    )
    scaled_upper_triang_masked_softmax_fusion: Fusion = param(
        False,
        origin="Meg",
        resume="free",
        doc="Use one fused kernel for scaling, causal mask and softmax instead of PyTorch's attention. auto: "
        "only where attention scores are materialized anyway (layer scaling) and the kernel is faster.",
    )
    scaled_masked_softmax_fusion: Fusion = param(
        False,
        origin="Meg",
        resume="free",
        doc="Use one fused kernel for scaling, any mask and softmax instead of PyTorch's attention. auto: "
        "only where attention scores are materialized anyway (layer scaling) and the kernel is faster.",
    )
    apply_query_key_layer_scaling: bool = param(
        False,
        origin="Meg",
        doc="Divide attention scores by the layer number, and multiply by it again in the softmax, to avoid "
        "overflow in fp16. Implies attention-softmax-in-fp32.",
    )
    attention_softmax_in_fp32: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="Compute the attention softmax in float32. It always is, in every precision.",
    )

    @field_validator("attention_config", mode="after")
    @classmethod
    def _make_immutable(cls, value: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return None if value is None else _as_tuples(value)


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
