"""Which earlier tokens the attention of a layer may see, from `attention_config` and `sparsity_config`."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from neox_launcher.config import Resolved
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
from neox_model.parallel.groups import Group

__all__ = ["PATTERNS"]

Factory = Callable[[], Pattern]
# (number of blocks, the head's place among all heads) -> layout
Layout = Callable[[int, int], Tensor]


def _global(resolved: Resolved, layer_index: int, group: Group) -> None:
    return None


def _local(resolved: Resolved, layer_index: int, group: Group) -> Factory:
    sparsity = resolved.config.attention.sparsity_config
    return partial(LocalPattern, block=sparsity.block, blocks_before=sparsity.local_attention_blocks // 2)


def _fixed(resolved: Resolved, layer_index: int, group: Group) -> Factory:
    sparsity = resolved.config.attention.sparsity_config
    num_patterns = sparsity.num_different_global_patterns

    def layout(num_blocks: int, head: int) -> Tensor:
        return fixed_layout(
            num_blocks,
            local_blocks=sparsity.num_local_blocks,
            global_blocks=sparsity.num_global_blocks,
            pattern=head % num_patterns,
        )

    return _block_pattern(resolved, group, layout, differs=num_patterns > 1)


def _variable(resolved: Resolved, layer_index: int, group: Group) -> Factory:
    sparsity = resolved.config.attention.sparsity_config
    seed = resolved.config.training.seed

    def layout(num_blocks: int, head: int) -> Tensor:
        return variable_layout(
            num_blocks,
            windows=sparsity.local_window_blocks,
            global_ranges=sparsity.global_ranges,
            draw=random_blocks(sparsity.num_random_blocks, seed=seed, layer=layer_index, head=head),
        )

    return _block_pattern(resolved, group, layout, differs=sparsity.num_random_blocks > 0)


def _bigbird(resolved: Resolved, layer_index: int, group: Group) -> Factory:
    sparsity = resolved.config.attention.sparsity_config
    seed = resolved.config.training.seed

    def layout(num_blocks: int, head: int) -> Tensor:
        return bigbird_layout(
            num_blocks,
            sliding_blocks=sparsity.num_sliding_window_blocks,
            global_blocks=sparsity.num_global_blocks,
            draw=random_blocks(sparsity.num_random_blocks, seed=seed, layer=layer_index, head=head),
        )

    return _block_pattern(resolved, group, layout, differs=sparsity.num_random_blocks > 0)


def _bslongformer(resolved: Resolved, layer_index: int, group: Group) -> Factory:
    sparsity = resolved.config.attention.sparsity_config

    def layout(num_blocks: int, head: int) -> Tensor:
        return bslongformer_layout(
            num_blocks,
            sliding_blocks=sparsity.num_sliding_window_blocks,
            global_ranges=sparsity.global_ranges,
        )

    return _block_pattern(resolved, group, layout, differs=False)


def _block_pattern(resolved: Resolved, group: Group, layout: Layout, *, differs: bool) -> Factory:
    """The pattern of a layout; of one for all heads where none would differ."""
    model, sparsity = resolved.config.model, resolved.config.attention.sparsity_config
    return partial(
        BlockPattern,
        num_blocks=-(-model.seq_length // sparsity.block),
        block=sparsity.block,
        layout=layout,
        heads=model.num_attention_heads,
        is_per_head=differs and sparsity.different_layout_per_head,
        group=group,
    )


# name in attention_config -> function of (configuration, the layer's place, tensor-parallel ranks) that gives
# what makes its pattern; None where a token sees all before it.
PATTERNS: dict[str, Callable[[Resolved, int, Group], Factory | None]] = {
    "global": _global,
    "local": _local,
    "sparse_fixed": _fixed,
    "sparse_variable": _variable,
    "bslongformer": _bslongformer,
    "bigbird": _bigbird,
}
