"""Attention: patterns of visible keys, and implementations (cores).

A core is `core(query_SBNK, key_TBNK, value_TBNK, document_ids_BS) -> context_SBNK` over the heads of this
rank, causal or in both directions.
"""

from neox_model.layers.attention.block_layouts import (
    bigbird_layout,
    bslongformer_layout,
    fixed_layout,
    random_blocks,
    variable_layout,
)
from neox_model.layers.attention.dense import DenseCore, SoftmaxCore
from neox_model.layers.attention.flex import DocumentMasks, FlexCore, FlexScoresCore
from neox_model.layers.attention.parallel_attention import ParallelAttention
from neox_model.layers.attention.patterns import BlockPattern, LocalPattern, Pattern

__all__ = [
    "BlockPattern",
    "DenseCore",
    "DocumentMasks",
    "FlexCore",
    "FlexScoresCore",
    "LocalPattern",
    "ParallelAttention",
    "Pattern",
    "SoftmaxCore",
    "bigbird_layout",
    "bslongformer_layout",
    "fixed_layout",
    "random_blocks",
    "variable_layout",
]
