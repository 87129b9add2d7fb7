"""The model: all that determines its logits, apart from the weights, as plain frozen values.

A model is a list of layers between an embedding and a head. A layer has a token mixer (`mixer`) and a channel
mixer (`channel`), each an instance of one of several classes. The layers of a model may differ.
"""

from dataclasses import dataclass
from typing import Literal

from neox_config.facts.norms import NORM_FACTS
from neox_config.facts.vocabulary import pad_vocabulary
from neox_config.spec.mixers import MLP, Attention, Experts, Mixer, SpatialMLP
from neox_config.spec.patterns import Blocks, Pattern, Window
from neox_config.spec.positions import AddedPosition, Alibi, Learned, Rotary, Rpe, Sinusoidal
from neox_config.spec.values import of

__all__ = [
    "MLP",
    "Adapters",
    "Alibi",
    "Attention",
    "Blocks",
    "Embedding",
    "Experts",
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
        zero_centered: its weight is stored minus 1.
    """

    kind: str = of("norm")
    epsilon: float = of("layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon")
    bias: bool = of("use_bias_in_norms")
    zero_centered: bool = of("norm_zero_centered", default=False)

    def num_weights(self, width: int) -> int:
        """Return the number of weights of a norm over `width` channels."""
        return NORM_FACTS[self.kind].num_weights(width, with_bias=self.bias)

    def sizes(self, width: int) -> list[int]:
        """Return the number of elements of each of its parameters."""
        both = self.num_weights(width)
        return [size for size in ((both - width, width) if self.bias else (both,)) if size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer.

    Args:
        mixer: what mixes tokens.
        channel: what mixes channels after it; None if the mixer does both.
        norm: the norm of the input or the output of each of the two.
        norm_placement: before: of the input; after: of the output, before it is added; both: of each.
        residual: serial: the second one reads the sum of input and mixer; parallel: both read the input.
        residual_after_norm: what is added is the norm's output, not its input.
        shares_norm: with a parallel residual, both read the output of one norm.
        owner: the first layer with the same weights; None: no layers share weights.
    """

    mixer: Mixer = of("attention_config")
    channel: MLP | Experts | None = of("moe_num_experts", "moe_layers", "attention_config")
    norm: Norm = of("norm")
    norm_placement: Literal["before", "after", "both"] = of("norm_placement", default="before")
    residual: Literal["serial", "parallel"] = of("gpt_j_residual")
    residual_after_norm: bool = of("apply_residual_connection_post_layernorm")
    shares_norm: bool = of("gpt_j_tied", default=False)
    owner: int | None = of("num_unique_layers", "param_sharing_style")

    @property
    def norms(self) -> tuple[int, ...]:
        """Return the number of norms between which the mixer is, and of those of the channel mixer."""
        each = 2 if self.norm_placement == "both" else 1
        return (each,) if self.channel is None else (each, 0 if self.shares_norm else each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding of tokens.

    Args:
        multiple: the number of entries of the vocabulary is rounded up to a multiple of it.
        scale: the vector of a token is multiplied by it.
        position: positions that are added to it; None: none are.
    """

    multiple: int = of("make_vocab_size_divisible_by")
    scale: float = of("embedding_scale")
    position: AddedPosition | None = of("pos_emb")

    def entries(self, vocab_size: int) -> int:
        """Return the number of entries of the logical vocabulary, given that of the tokenizer."""
        return pad_vocabulary(vocab_size, self.multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A head with a logit per entry of the vocabulary.

    Args:
        tied: its matrix is that of the embedding.
        scale: logits are multiplied by it.
        softcap: they are then limited to it smoothly; None: they are not.
    """

    tied: bool = of("no_weight_tying")
    scale: float = of("logit_scale")
    softcap: float | None = of("logit_softcap")


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
