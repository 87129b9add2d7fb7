"""Build the attention patterns of layers from `attention_config` and `sparsity_config`."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from neox_config import Resolved
from neox_config.derive.attention_layers import sliding_window
from neox_config.schema.sections.attention import SparsityConfig
from neox_model.layers.attention import (
    BlockPattern,
    LocalPattern,
    Pattern,
    bigbird_layout,
    bslongformer_layout,
    fixed_layout,
    random_blocks,
    variable_layout,
)
from neox_model.layers.attention.block_layouts import Draw
from neox_model.parallel.groups import Group

__all__ = ["PATTERNS"]

Factory = Callable[[], Pattern]
# (settings, number of blocks, index of the head among all heads, its random blocks) -> layout
Layout = Callable[[SparsityConfig, int, int, Draw], Tensor]


def _global(resolved: Resolved, layer_index: int, group: Group) -> Factory | None:
    """Return a window of blocks of one token, or None if every sample fits into it."""
    window = sliding_window(resolved.config)
    return None if window is None else partial(LocalPattern, block=1, blocks_before=window)


def _local(resolved: Resolved, layer_index: int, group: Group) -> Factory:
    sparsity = resolved.config.attention.sparsity_config
    return partial(LocalPattern, block=sparsity.block, blocks_before=sparsity.local_attention_blocks // 2)


def _fixed(sparsity: SparsityConfig, num_blocks: int, head: int, draw: Draw) -> Tensor:
    return fixed_layout(
        num_blocks,
        local_blocks=sparsity.num_local_blocks,
        global_blocks=sparsity.num_global_blocks,
        pattern=head % sparsity.num_different_global_patterns,
    )


def _variable(sparsity: SparsityConfig, num_blocks: int, head: int, draw: Draw) -> Tensor:
    return variable_layout(
        num_blocks,
        windows=sparsity.local_window_blocks,
        global_ranges=sparsity.global_ranges,
        draw=draw,
    )


def _bslongformer(sparsity: SparsityConfig, num_blocks: int, head: int, draw: Draw) -> Tensor:
    return bslongformer_layout(
        num_blocks,
        sliding_blocks=sparsity.num_sliding_window_blocks,
        global_ranges=sparsity.global_ranges,
    )


def _bigbird(sparsity: SparsityConfig, num_blocks: int, head: int, draw: Draw) -> Tensor:
    return bigbird_layout(
        num_blocks,
        sliding_blocks=sparsity.num_sliding_window_blocks,
        global_blocks=sparsity.num_global_blocks,
        draw=draw,
    )


_LAYOUTS: dict[str, Layout] = {
    "sparse_fixed": _fixed,
    "sparse_variable": _variable,
    "bslongformer": _bslongformer,
    "bigbird": _bigbird,
}


def _blocks(kind: str, resolved: Resolved, layer_index: int, group: Group) -> Factory:
    """Return a factory of a sparse pattern; one layout for all heads if they do not differ."""
    model, sparsity = resolved.config.model, resolved.config.attention.sparsity_config
    seed = resolved.config.training.seed

    def layout_of(num_blocks: int, head: int) -> Tensor:
        draw = random_blocks(sparsity.num_random_blocks, seed=seed, layer=layer_index, head=head)
        return _LAYOUTS[kind](sparsity, num_blocks, head, draw)

    return partial(
        BlockPattern,
        num_blocks=-(-model.seq_length // sparsity.block),
        block=sparsity.block,
        layout=layout_of,
        heads=model.num_attention_heads,
        is_per_head=sparsity.different_layout_per_head and sparsity.can_differ_per_head(kind),
        group=group,
    )


# Name in attention_config -> function of (configuration, layer index, tensor-parallel ranks) that returns a
# factory of the pattern, or None if a token sees all earlier ones.
PATTERNS: dict[str, Callable[[Resolved, int, Group], Factory | None]] = {
    "global": _global,
    "local": _local,
    **{kind: partial(_blocks, kind) for kind in _LAYOUTS},
}
