"""Attention types of layers, by their name in `attention_config`."""

from collections.abc import Mapping
from dataclasses import dataclass

from neox_config.facts.conditions import one_of

__all__ = [
    "ATTENTION_FACTS",
    "BIASED_SCORES",
    "BLOCKS_OF_ENCODER",
    "GMLP_TYPES",
    "ROWS_OF_ENCODER",
    "RPE_OF_ENCODER",
    "WITHOUT_HEADS",
    "WITH_HEADS",
    "AttentionFacts",
    "attention_type",
    "has_layers",
    "layers_using",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """One attention type.

    Args:
        settings: parameters of `sparsity_config` that have an effect.
        has_heads: True if the layer has the heads and projections of attention (attention.qkv and
            attention.dense).
        is_gmlp: True if the mixer is the whole layer, a gMLP, without an MLP behind it.
        has_inner_attention: True if a gMLP layer has one small attention head.
    """

    settings: tuple[str, ...] = ()
    has_heads: bool = True
    is_gmlp: bool = False
    has_inner_attention: bool = False

    @property
    def is_in_blocks(self) -> bool:
        """True if the block size must divide the sequence length."""
        return bool(self.settings)


BIASED_SCORES = ("rpe", "alibi")
"""Position embeddings (`pos_emb`) that are a bias on attention scores."""

_ROWS = "horizontal_global_attention"
_LISTED = ("global_block_indices", "global_block_end_indices")

ATTENTION_FACTS: Mapping[str, AttentionFacts] = {
    "global": AttentionFacts(),
    "local": AttentionFacts(settings=("num_local_blocks", "num_sliding_window_blocks")),
    "sparse_fixed": AttentionFacts(
        settings=(
            *("num_local_blocks", "num_global_blocks"),
            *("different_layout_per_head", "num_different_global_patterns", _ROWS),
        ),
    ),
    "sparse_variable": AttentionFacts(
        settings=("different_layout_per_head", "num_random_blocks", "local_window_blocks", _ROWS, *_LISTED),
    ),
    "bslongformer": AttentionFacts(settings=("num_sliding_window_blocks", *_LISTED)),
    "bigbird": AttentionFacts(
        settings=(
            *("num_sliding_window_blocks", "num_global_blocks"),
            *("different_layout_per_head", "num_random_blocks"),
        ),
    ),
    "gmlp": AttentionFacts(has_heads=False, is_gmlp=True),
    "amlp": AttentionFacts(has_heads=False, is_gmlp=True, has_inner_attention=True),
}


def attention_type(name: str) -> str:
    """Return the type of layers of this name in `attention_config`; kinds of `attention_kinds` are global."""
    return name if name in ATTENTION_FACTS else "global"


GMLP_TYPES = tuple(name for name, facts in ATTENTION_FACTS.items() if facts.is_gmlp)

WITHOUT_HEADS = tuple(name for name, facts in ATTENTION_FACTS.items() if not facts.has_heads)
"""Types of layers whose mixer is not attention over heads."""


def layers_using(setting: str) -> str:
    """Return the condition under which a parameter of `sparsity_config` has an effect, for the reference."""
    return has_layers(tuple(name for name, facts in ATTENTION_FACTS.items() if setting in facts.settings))


def has_layers(types: tuple[str, ...]) -> str:
    """Return the condition that a model has layers of one of these types, for the reference."""
    return f"attention_config has {one_of(types)} layers"


WITH_HEADS = has_layers(tuple(name for name, facts in ATTENTION_FACTS.items() if facts.has_heads))
"""Condition of the parameters of attention over heads, for the reference."""

# Conditions of parameters that have an effect in encoders alone.
BLOCKS_OF_ENCODER = "objective is not causal and attention_config has layers in blocks"
ROWS_OF_ENCODER = f"objective is not causal and {layers_using(_ROWS)}"
RPE_OF_ENCODER = "objective is not causal and pos_emb is rpe"
