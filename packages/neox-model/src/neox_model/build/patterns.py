"""Which earlier tokens the attention of a layer may see, from `attention_config` and `sparsity_config`."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from neox_launcher.config import Resolved
from neox_launcher.config.sections.attention import SparsityConfig
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
# (settings, number of blocks, the head's place among all heads, its random blocks) -> layout
Layout = Callable[[SparsityConfig, int, int, Draw], Tensor]


def _global(resolved: Resolved, layer_index: int, group: Group) -> None:
    return None


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


# Whether heads would have layouts of their own.
_DIFFERS: dict[Layout, Callable[[SparsityConfig], bool]] = {
    _fixed: lambda sparsity: sparsity.num_different_global_patterns > 1,
    _variable: lambda sparsity: sparsity.num_random_blocks > 0,
    _bslongformer: lambda sparsity: False,
    _bigbird: lambda sparsity: sparsity.num_random_blocks > 0,
}


def _blocks(layout: Layout, resolved: Resolved, layer_index: int, group: Group) -> Factory:
    """The pattern of a layout; of one for all heads where none would differ."""
    model, sparsity = resolved.config.model, resolved.config.attention.sparsity_config
    seed = resolved.config.training.seed

    def layout_of(num_blocks: int, head: int) -> Tensor:
        draw = random_blocks(sparsity.num_random_blocks, seed=seed, layer=layer_index, head=head)
        return layout(sparsity, num_blocks, head, draw)

    return partial(
        BlockPattern,
        num_blocks=-(-model.seq_length // sparsity.block),
        block=sparsity.block,
        layout=layout_of,
        heads=model.num_attention_heads,
        is_per_head=sparsity.different_layout_per_head and _DIFFERS[layout](sparsity),
        group=group,
    )


# name in attention_config -> function of (configuration, the layer's place, tensor-parallel ranks) that gives
# what makes its pattern; None where a token sees all before it.
PATTERNS: dict[str, Callable[[Resolved, int, Group], Factory | None]] = {
    "global": _global,
    "local": _local,
    "sparse_fixed": partial(_blocks, _fixed),
    "sparse_variable": partial(_blocks, _variable),
    "bslongformer": partial(_blocks, _bslongformer),
    "bigbird": partial(_blocks, _bigbird),
}
