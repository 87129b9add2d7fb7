"""Attention types of layers, by their name in `attention_config`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from neox_config.facts.conditions import one_of

__all__ = [
    "ATTENTION_FACTS",
    "BIASED_SCORES",
    "BLOCKS_OF_ENCODER",
    "GMLP_TYPES",
    "ROWS_OF_ENCODER",
    "RPE_OF_ENCODER",
    "AttentionFacts",
    "Sparsity",
    "has_layers",
    "layers_using",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """Keys that a query attends to, in blocks of `block` tokens; `window`, of global layers, in tokens.

    If attention is not causal, windows reach equally far behind the query.
    """

    is_causal: bool = True

    block: int = 16
    local_blocks: int = 4
    local_attention_blocks: int = 4
    global_blocks: int = 1
    random_blocks: int = 0
    sliding_blocks: int = 3
    variable_window: float = 4.0
    listed_global_blocks: int = 1
    window: int | None = None

    def reach(self, before: int) -> int:
        """Return the length of a window of which `before` is before the query."""
        return before + 1 if self.is_causal else 2 * before + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """One attention type.

    Args:
        blocks_per_query: blocks of keys that a query is multiplied with, by the blocks of a sequence; None if
            the layer has no attention over heads.
        settings: parameters of `sparsity_config` that have an effect.
        has_inner_attention: True if a gMLP layer has one small attention head.
    """

    blocks_per_query: Callable[[Sparsity, float], float] | None = None
    settings: tuple[str, ...] = ()
    has_inner_attention: bool = False

    @property
    def is_gmlp(self) -> bool:
        """True if the layer mixes positions without attention over heads."""
        return self.blocks_per_query is None

    @property
    def is_in_blocks(self) -> bool:
        """True if the block size must divide the sequence length."""
        return bool(self.settings)


BIASED_SCORES = ("rpe", "alibi")
"""Position embeddings (`pos_emb`) that are a bias on attention scores."""

_ROWS = "horizontal_global_attention"
_LISTED = ("global_block_indices", "global_block_end_indices")

ATTENTION_FACTS: Mapping[str, AttentionFacts] = {
    "global": AttentionFacts(
        blocks_per_query=lambda given, blocks: (
            blocks if given.window is None else given.reach(given.window) / given.block
        )
    ),
    "local": AttentionFacts(
        blocks_per_query=lambda given, blocks: given.reach(given.local_attention_blocks // 2),
        settings=("num_local_blocks", "num_sliding_window_blocks"),
    ),
    "sparse_fixed": AttentionFacts(
        blocks_per_query=lambda given, blocks: (
            given.local_blocks + blocks / given.local_blocks * given.global_blocks
        ),
        settings=(
            *("num_local_blocks", "num_global_blocks"),
            *("different_layout_per_head", "num_different_global_patterns", _ROWS),
        ),
    ),
    "sparse_variable": AttentionFacts(
        blocks_per_query=lambda given, blocks: (
            given.variable_window + given.listed_global_blocks + given.random_blocks
        ),
        settings=("different_layout_per_head", "num_random_blocks", "local_window_blocks", _ROWS, *_LISTED),
    ),
    "bslongformer": AttentionFacts(
        blocks_per_query=lambda given, blocks: given.sliding_blocks + given.listed_global_blocks,
        settings=("num_sliding_window_blocks", *_LISTED),
    ),
    "bigbird": AttentionFacts(
        blocks_per_query=lambda given, blocks: (
            given.sliding_blocks + given.global_blocks + given.random_blocks
        ),
        settings=(
            *("num_sliding_window_blocks", "num_global_blocks"),
            *("different_layout_per_head", "num_random_blocks"),
        ),
    ),
    "gmlp": AttentionFacts(),
    "amlp": AttentionFacts(has_inner_attention=True),
}

GMLP_TYPES = tuple(name for name, facts in ATTENTION_FACTS.items() if facts.is_gmlp)


def layers_using(setting: str) -> str:
    """Return the condition under which a parameter of `sparsity_config` has an effect, for the reference."""
    return has_layers(tuple(name for name, facts in ATTENTION_FACTS.items() if setting in facts.settings))


def has_layers(types: tuple[str, ...]) -> str:
    """Return the condition that a model has layers of one of these types, for the reference."""
    return f"attention_config has {one_of(types)} layers"


# Conditions of parameters that have an effect in encoders alone.
BLOCKS_OF_ENCODER = "objective is not causal and attention_config has layers in blocks"
ROWS_OF_ENCODER = f"objective is not causal and {layers_using(_ROWS)}"
RPE_OF_ENCODER = "objective is not causal and pos_emb is rpe"
