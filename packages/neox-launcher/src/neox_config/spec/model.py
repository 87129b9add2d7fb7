"""The model: all that determines its logits, apart from the weights, as plain frozen values.

A model is a list of layers between an embedding and a head. A layer mixes tokens (`mixer`) and then channels
(`channel`), each of some kind with fields of its own. Layers may differ.
"""

from dataclasses import dataclass
from typing import Any, Literal

from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.norms import NORM_FACTS
from neox_config.facts.vocabulary import pad_vocabulary
from neox_config.spec.values import of

__all__ = [
    "MLP",
    "Adapters",
    "Alibi",
    "Attention",
    "Blocks",
    "Embedding",
    "Layer",
    "Learned",
    "Mixer",
    "ModelSpec",
    "Norm",
    "Pattern",
    "Retrieval",
    "Rotary",
    "Rpe",
    "Sinusoidal",
    "SpatialMLP",
    "Vocabulary",
    "Window",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over the channels of a token.

    Args:
        kind: a key of `NORM_FACTS`; apexlayernorm computes the same as layernorm, which is written here.
        epsilon: its constant.
        bias: it adds a bias.
    """

    kind: str = of("norm")
    epsilon: float = of("layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon")
    bias: bool = of("use_bias_in_norms")

    def num_weights(self, width: int) -> int:
        """Return the number of weights of a norm over `width` channels."""
        return NORM_FACTS[self.kind].num_weights(width, with_bias=self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A vector per position, added to the embeddings."""

    count: int = of("max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinusoidal:
    """Sines and cosines of the position, added to the embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotation of queries and keys by angles that grow with the position.

    Args:
        fraction: fraction of a head's channels that is rotated.
        base: base of the frequencies.
        scaling: settings of scaled frequencies that have an effect, in the order of `rotary_scaling`;
            empty: not scaled.
    """

    fraction: float = of("rotary_pct")
    base: float = of("rotary_emb_base")
    scaling: tuple[tuple[str, Any], ...] = of("rotary_scaling", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """A bias on attention scores that falls with the distance.

    Args:
        times: number that multiplies it, which layer scaling makes the number of the layer.
    """

    times: int = of("apply_query_key_layer_scaling", default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpe:
    """A learned bias on attention scores per head and bucket of distances.

    Args:
        buckets: number of buckets.
        max_distance: distances of this many tokens or more share the last bucket.
        both_ways: half of the buckets are for later tokens.
        times: as in `Alibi`.
    """

    buckets: int = of("rpe_num_buckets")
    max_distance: int = of("rpe_max_distance")
    both_ways: bool = of("rpe_causal")
    times: int = of("apply_query_key_layer_scaling", default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A query sees a number of blocks before its block; all blocks are aligned to the start.

    Args:
        block: tokens of a block.
        before: number of blocks before that of the query; as many follow in layers that see later tokens.
    """

    block: int = of("sparsity_config.block")
    before: int = of("sliding_window_width", "sparsity_config.num_local_blocks")

    def blocks_per_query(self, blocks: float, *, both_ways: bool) -> float:
        """Return the blocks that a query is multiplied with, apart from the ends of the sequence."""
        return (2 if both_ways else 1) * self.before + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A layout of blocks of DeepSpeed's sparse attention. What a kind does not use has its default.

    Args:
        kind: sparse_fixed, sparse_variable, bslongformer or bigbird.
        block: tokens of a block.
        local_blocks: width of the windows of sparse_fixed.
        global_blocks: number of global blocks: at the end of each window, or at the start of the sequence.
        patterns: number of different positions of global blocks among heads.
        sliding_blocks: width of a sliding window.
        random_blocks: number of random blocks per row.
        windows: widths of the first windows; the last one is repeated.
        global_ranges: (start, stop) of listed global blocks.
        has_global_rows: global blocks see all blocks.
        is_per_head: heads have different layouts.
        seed: seed of the random blocks; 0 without these.
    """

    kind: str = of("attention_config")
    block: int = of("sparsity_config.block")
    local_blocks: int = of("sparsity_config.num_local_blocks", default=0)
    global_blocks: int = of("sparsity_config.num_global_blocks", default=0)
    patterns: int = of("sparsity_config.num_different_global_patterns", default=1)
    sliding_blocks: int = of("sparsity_config.num_sliding_window_blocks", default=0)
    random_blocks: int = of("sparsity_config.num_random_blocks", default=0)
    windows: tuple[int, ...] = of("sparsity_config.local_window_blocks", default=())
    global_ranges: tuple[tuple[int, int], ...] = of("sparsity_config.global_block_indices", default=())
    has_global_rows: bool = of("sparsity_config.horizontal_global_attention", default=False)
    is_per_head: bool = of("sparsity_config.different_layout_per_head", default=False)
    seed: int = of("seed", default=0)

    def blocks_per_query(self, blocks: float, *, both_ways: bool) -> float:
        """Return how many of the blocks of a sequence a query is multiplied with; without a window, all."""
        window: float = self.local_blocks or self.sliding_blocks or 0
        if not window:
            window = sum(self.windows) / len(self.windows) if self.windows else blocks
        # Global blocks are at the end of each window of sparse_fixed, and once in other kinds.
        times = blocks / self.local_blocks if self.local_blocks else 1
        listed = sum(stop - start for start, stop in self.global_ranges)
        return window + times * (self.global_blocks or 0) + listed + self.random_blocks


Pattern = Window | Blocks


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
        qkv_bias: the query-key-value projection has a bias.
        output_bias: the output projection has a bias.
    """

    kind: str = of("attention_config", compare=False)
    heads: int = of("num_attention_heads")
    kv_heads: int = of("num_kv_heads", "num_attention_heads")
    head_width: int = of("hidden_size", "num_attention_heads")
    pattern: Window | Blocks | None = of("sliding_window_width", "attention_config")
    both_ways: bool = of("objective", "sparsity_config.attention")
    position: Rotary | Rpe | Alibi | None = of("pos_emb")
    qkv_bias: bool = of("use_bias_in_qkv", "use_bias_in_attn_linear")
    output_bias: bool = of("use_bias_in_attn_linear")

    def pattern_within(self, length: int) -> Window | Blocks | None:
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


Mixer = Attention | SpatialMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """Two projections with an activation between them, or three with a gate.

    Args:
        width: width of each input projection.
        activation: a key of `ACTIVATION_FACTS`, or gelu_tanh for the tanh form of gelu.
        bias: the projections have biases.
    """

    width: int = of("mlp_width", "intermediate_size", "expansion_factor")
    activation: str = of("activation", "openai_gelu")
    bias: bool = of("use_bias_in_mlp")

    @property
    def is_gated(self) -> bool:
        """True if there is a second input projection, whose output is activated and multiplied."""
        return ACTIVATION_FACTS[self.activation.removesuffix("_tanh")].is_gated


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer.

    Args:
        mixer: what mixes tokens.
        channel: what mixes channels after it; None if the mixer does both.
        norm: the norm of the input of each of the two.
        residual: serial: the second one reads the sum of input and mixer; parallel: both read the input.
        residual_after_norm: what is added is the norm's output, not its input.
        owner: the first layer with the same weights; None: no layers share weights.
    """

    mixer: Attention | SpatialMLP = of("attention_config")
    channel: MLP | None = of("attention_config")
    norm: Norm = of("norm")
    residual: Literal["serial", "parallel"] = of("gpt_j_residual")
    residual_after_norm: bool = of("apply_residual_connection_post_layernorm")
    owner: int | None = of("num_unique_layers", "param_sharing_style")


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding of tokens.

    Args:
        multiple: the number of entries of the vocabulary is rounded up to a multiple of it.
        position: positions that are added to it; None: none are.
    """

    multiple: int = of("make_vocab_size_divisible_by")
    position: Learned | Sinusoidal | None = of("pos_emb")

    def entries(self, vocab_size: int) -> int:
        """Return the number of entries of the logical vocabulary, given that of the tokenizer."""
        return pad_vocabulary(vocab_size, self.multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A head with a logit per entry of the vocabulary; `tied`: its matrix is that of the embedding."""

    tied: bool = of("no_weight_tying")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """A head that embeds a text as `size` numbers; `shared`: questions and blocks have one model, not two."""

    size: int = of("ict_head_size")
    shared: bool = of("ict_shared_towers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters of matrices: `alpha / rank * B (A x)` is added to `W x` (arXiv:2106.09685).

    Args:
        rank: inner width.
        alpha: numerator of the scale.
        matrices: names of the adapted matrices of a layer, of `ADAPTED`.
    """

    rank: int = of("lora_rank")
    alpha: float = of("lora_alpha")
    matrices: tuple[str, ...] = of("lora_target_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The whole model.

    Args:
        width: channels between layers.
        max_positions: the longest sequence.
        objective: causal: it predicts the next token; masked and ict: tokens see later ones.
        embedding: the embedding of tokens.
        layers: the layers, from the input.
        norm: the norm after the last layer.
        head: what follows it.
        adapters: low-rank adapters of the layers' matrices; None: none.
    """

    width: int = of("hidden_size")
    max_positions: int = of("max_position_embeddings")
    objective: Literal["causal", "masked", "ict"] = of("objective")
    embedding: Embedding = of("pos_emb")
    layers: tuple[Layer, ...] = of("num_layers")
    norm: Norm = of("norm")
    head: Vocabulary | Retrieval = of("objective")
    adapters: Adapters | None = of("lora_rank")

    def __hash__(self) -> int:
        # Of few values: a model has hundreds of layers, and a search for a layout looks it up all the time.
        return hash((self.width, self.max_positions, len(self.layers), self.head, self.adapters))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Attention type of each layer, as in attention_config."""
        return tuple(layer.mixer.kind for layer in self.layers)

    @property
    def is_encoder(self) -> bool:
        """True if tokens see later ones."""
        return self.objective != "causal"

    @property
    def is_tied(self) -> bool:
        """True if the matrix of the head is that of the embedding."""
        return isinstance(self.head, Vocabulary) and self.head.tied

    @property
    def towers(self) -> int:
        """Number of models of this form, each with its weights."""
        return 2 if isinstance(self.head, Retrieval) and not self.head.shared else 1

    @property
    def texts(self) -> int:
        """Number of texts of a sample: two in a retrieval model, a question and a block."""
        return 2 if isinstance(self.head, Retrieval) else 1
