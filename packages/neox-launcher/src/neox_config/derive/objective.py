"""What follows from the objective: which tokens see which, and how samples are made."""

from neox_config.facts.attention import ATTENTION_FACTS, attention_type
from neox_config.schema.config import NeoXConfig

__all__ = [
    "WITHOUT_TEXTS",
    "has_padding",
    "is_encoder",
    "is_masked",
    "is_retrieval",
    "sees_later_tokens",
    "tokens_behind_input",
]

WITHOUT_TEXTS = (
    "is for models whose tokens see later ones, which cannot continue texts; use a model that was trained "
    "with objective: causal"
)


def is_masked(config: NeoXConfig) -> bool:
    """Return True if the model predicts masked tokens from all others, instead of the next token."""
    return config.model.objective == "masked"


def is_retrieval(config: NeoXConfig) -> bool:
    """Return True if the model embeds questions and blocks of text, to find the block of a question."""
    return config.model.objective == "ict"


def is_encoder(config: NeoXConfig) -> bool:
    """Return True if tokens see later ones."""
    return config.model.objective != "causal"


def sees_later_tokens(config: NeoXConfig, kind: str) -> bool:
    """Return True if tokens see later ones in layers of this attention type."""
    is_both_ways = config.attention.sparsity_config.attention == "bidirectional"
    return is_encoder(config) and (is_both_ways or not ATTENTION_FACTS[attention_type(kind)].is_in_blocks)


def tokens_behind_input(config: NeoXConfig) -> int:
    """Return the number of tokens of a sample behind the model's input, which are predicted alone."""
    return 0 if is_encoder(config) else 1


def has_padding(config: NeoXConfig) -> bool:
    """Return True if tokens would see padding: behind a causal model's samples, no token sees it."""
    is_cut = config.objective.short_seq_prob > 0 or config.data.pack_impl != "packed"
    return is_retrieval(config) or (is_masked(config) and is_cut)
