"""Build the attention patterns of layers."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from neox_config.spec.model import Attention, Blocks, Window
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

__all__ = ["PATTERNS", "build_pattern"]

Factory = Callable[[], Pattern]


def _fixed(blocks: Blocks, num_blocks: int, head: int, draw: Draw, is_causal: bool) -> Tensor:
    return fixed_layout(
        num_blocks,
        local_blocks=blocks.local_blocks,
        global_blocks=blocks.global_blocks,
        pattern=head % blocks.patterns,
        is_causal=is_causal,
        has_global_rows=blocks.has_global_rows,
    )


def _variable(blocks: Blocks, num_blocks: int, head: int, draw: Draw, is_causal: bool) -> Tensor:
    return variable_layout(
        num_blocks,
        windows=blocks.windows,
        global_ranges=blocks.global_ranges,
        draw=draw,
        is_causal=is_causal,
        has_global_rows=blocks.has_global_rows,
    )


def _bslongformer(blocks: Blocks, num_blocks: int, head: int, draw: Draw, is_causal: bool) -> Tensor:
    return bslongformer_layout(
        num_blocks,
        sliding_blocks=blocks.sliding_blocks,
        global_ranges=blocks.global_ranges,
        is_causal=is_causal,
    )


def _bigbird(blocks: Blocks, num_blocks: int, head: int, draw: Draw, is_causal: bool) -> Tensor:
    return bigbird_layout(
        num_blocks,
        sliding_blocks=blocks.sliding_blocks,
        global_blocks=blocks.global_blocks,
        draw=draw,
        is_causal=is_causal,
    )


# Kind of a layout of blocks -> function that returns the layout of a head, given the settings, the blocks of
# the longest window, the index of the head among all heads, what draws its random blocks, and whether blocks
# see only earlier blocks and themselves.
_LAYOUTS: dict[str, Callable[[Blocks, int, int, Draw, bool], Tensor]] = {
    "sparse_fixed": _fixed,
    "sparse_variable": _variable,
    "bslongformer": _bslongformer,
    "bigbird": _bigbird,
}


def _blocks(mixer: Attention, pattern: Blocks, layer_index: int, length: int, group: Group) -> Factory:
    """Return a factory of a layout of blocks; one for all heads if they do not differ."""
    is_causal = not mixer.both_ways

    def layout_of(num_blocks: int, head: int) -> Tensor:
        among = None if is_causal else num_blocks
        draw = random_blocks(
            pattern.random_blocks, seed=pattern.seed, layer=layer_index, head=head, among=among
        )
        return _LAYOUTS[pattern.kind](pattern, num_blocks, head, draw, is_causal)

    return partial(
        BlockPattern,
        num_blocks=-(-length // pattern.block),
        block=pattern.block,
        layout=layout_of,
        heads=mixer.heads,
        is_per_head=pattern.is_per_head,
        group=group,
    )


# Attention type -> function of attention, pattern, layer index, longest sequence and ranks, which
# returns a factory of the pattern.
PATTERNS: dict[str, Callable[[Attention, Blocks, int, int, Group], Factory]] = {
    **dict.fromkeys(_LAYOUTS, _blocks),
}


def build_pattern(mixer: Attention, layer_index: int, *, length: int, group: Group) -> Factory | None:
    """Return a factory of the pattern of a layer's attention; None if only causality hides tokens.

    Args:
        mixer: the attention.
        layer_index: index of the layer, from 0, on which random blocks depend.
        length: longest sequence.
        group: the ranks over which the heads are split.
    """
    pattern = mixer.pattern_within(length)
    if pattern is None:
        return None
    if isinstance(pattern, Window):
        return partial(
            LocalPattern, block=pattern.block, blocks_before=pattern.before, both_ways=mixer.both_ways
        )
    return PATTERNS[pattern.kind](mixer, pattern, layer_index, length, group)
