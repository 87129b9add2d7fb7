"""Build the attention patterns of layers from `attention_config` and `sparsity_config`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from neox_config import Resolved
from neox_config.derive.attention_layers import sliding_window
from neox_config.derive.objective import sees_later_tokens
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
Layout = Callable[["_Request"], Tensor]


def _global(resolved: Resolved, layer_index: int, group: Group) -> Factory | None:
    """Return a window of blocks of one token, or None if every sample fits into it."""
    window = sliding_window(resolved.config)
    both_ways = sees_later_tokens(resolved.config, "global")
    return None if window is None else _near(block=1, blocks_before=window, both_ways=both_ways)


def _local(resolved: Resolved, layer_index: int, group: Group) -> Factory:
    sparsity = resolved.config.attention.sparsity_config
    before, both_ways = sparsity.local_attention_blocks // 2, sees_later_tokens(resolved.config, "local")
    return _near(block=sparsity.block, blocks_before=before, both_ways=both_ways)


def _near(**arguments: Any) -> Factory:
    return partial(LocalPattern, **arguments)


@dataclass(frozen=True, slots=True)
class _Request:
    """What determines the layout of a head.

    Args:
        sparsity: the settings.
        num_blocks: blocks of the longest window.
        head: index of the head among all heads.
        draw: draws its random blocks.
        is_causal: blocks see only earlier blocks and themselves.
    """

    sparsity: SparsityConfig
    num_blocks: int
    head: int
    draw: Draw
    is_causal: bool

    @property
    def has_global_rows(self) -> bool:
        """Return True if global blocks see all blocks."""
        return not self.is_causal and self.sparsity.horizontal_global_attention


def _fixed(request: _Request) -> Tensor:
    sparsity = request.sparsity
    return fixed_layout(
        request.num_blocks,
        local_blocks=sparsity.num_local_blocks,
        global_blocks=sparsity.num_global_blocks,
        pattern=request.head % sparsity.num_different_global_patterns,
        is_causal=request.is_causal,
        has_global_rows=request.has_global_rows,
    )


def _variable(request: _Request) -> Tensor:
    sparsity = request.sparsity
    return variable_layout(
        request.num_blocks,
        windows=sparsity.local_window_blocks,
        global_ranges=sparsity.global_ranges,
        draw=request.draw,
        is_causal=request.is_causal,
        has_global_rows=request.has_global_rows,
    )


def _bslongformer(request: _Request) -> Tensor:
    return bslongformer_layout(
        request.num_blocks,
        sliding_blocks=request.sparsity.num_sliding_window_blocks,
        global_ranges=request.sparsity.global_ranges,
        is_causal=request.is_causal,
    )


def _bigbird(request: _Request) -> Tensor:
    return bigbird_layout(
        request.num_blocks,
        sliding_blocks=request.sparsity.num_sliding_window_blocks,
        global_blocks=request.sparsity.num_global_blocks,
        draw=request.draw,
        is_causal=request.is_causal,
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
    is_causal = not sees_later_tokens(resolved.config, kind)

    def layout_of(num_blocks: int, head: int) -> Tensor:
        among = None if is_causal else num_blocks
        draw = random_blocks(sparsity.num_random_blocks, seed=seed, layer=layer_index, head=head, among=among)
        return _LAYOUTS[kind](_Request(sparsity, num_blocks, head, draw, is_causal))

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
# factory of the pattern, or None if only causality hides tokens.
PATTERNS: dict[str, Callable[[Resolved, int, Group], Factory | None]] = {
    "global": _global,
    "local": _local,
    **{kind: partial(_blocks, kind) for kind in _LAYOUTS},
}
