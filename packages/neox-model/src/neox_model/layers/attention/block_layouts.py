"""Block layouts of the sparse attention types: the blocks of keys that each block of queries sees.

A layout is a boolean tensor [layouts, C, C], C blocks of queries by C blocks of keys, with one layout per
head or one for all heads. If attention is causal, entries above the diagonal are False, and within a block on
the diagonal each token sees only earlier tokens and itself. Every block sees itself.

Sources: arXiv:1904.10509 (fixed), arXiv:2004.05150 (bslongformer), arXiv:2007.14062 (bigbird); the patterns
and their settings are those of DeepSpeed's sparse attention.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neox_model.parallel.random import mixed_seed

__all__ = ["bigbird_layout", "bslongformer_layout", "fixed_layout", "random_blocks", "variable_layout"]

# Block of queries -> the blocks of keys drawn for it.
Draw = Callable[[int], Sequence[int]]


def random_blocks(count: int, *, seed: int, layer: int, head: int, among: int | None = None) -> Draw:
    """Return a function that draws `count` of the blocks visible to a block of queries (all if fewer).

    The draw depends only on seed, layer, head and block, and on `among`, so that it is the same in every
    layout of ranks and, in causal attention, at every length.

    Args:
        count: blocks drawn for each block of queries.
        seed: random seed of the model.
        layer: index of the layer, from 0.
        head: index of the head among all heads, from 0.
        among: number of blocks of the sequence, all of which can be drawn; None: the block itself and earlier
            ones.
    """

    def draw(row: int) -> Sequence[int]:
        generator = torch.Generator("cpu").manual_seed(mixed_seed("blocks", seed, layer, head, row))
        order: list[int] = torch.randperm(among or row + 1, generator=generator, device="cpu").tolist()
        return order[:count]

    return draw


def fixed_layout(
    num_blocks: int,
    *,
    local_blocks: int,
    global_blocks: int,
    pattern: int = 0,
    is_causal: bool = True,
    has_global_rows: bool = False,
) -> Tensor:
    """Return windows of `local_blocks`, some blocks of which are visible to all other (later) blocks.

    Args:
        num_blocks: C.
        local_blocks: blocks of a window; the last window may be shorter.
        global_blocks: blocks of a window that other windows see.
        pattern: position of these blocks: 0 the last `global_blocks` of the window, 1 those before them, and
            so on.
        is_causal: blocks see only earlier blocks and themselves.
        has_global_rows: these blocks see all blocks.
    """
    layout_CC = _windows(num_blocks, [local_blocks])
    first = local_blocks - (1 + pattern) * global_blocks
    whole = num_blocks - num_blocks % local_blocks
    starts = list(range(first, whole, local_blocks))
    if whole < num_blocks:
        starts.append(max(0, min(whole + first, num_blocks - global_blocks)))
    ranges = [(start, start + global_blocks) for start in starts]
    return _causal(_with_global(layout_CC, ranges, has_rows=has_global_rows), is_causal)


def variable_layout(
    num_blocks: int,
    *,
    windows: Sequence[int],
    global_ranges: Sequence[tuple[int, int]],
    draw: Draw,
    is_causal: bool = True,
    has_global_rows: bool = False,
) -> Tensor:
    """Return windows of given sizes (the last repeats), global blocks, and random blocks.

    Args:
        num_blocks: C.
        windows: number of blocks of each window.
        global_ranges: (start, stop) of the blocks that all other (later) blocks see.
        draw: draws the random blocks of each block of queries.
        is_causal: blocks see only earlier blocks and themselves.
        has_global_rows: global blocks see all blocks.
    """
    layout_CC = _with_global(_windows(num_blocks, windows), global_ranges, has_rows=has_global_rows)
    return _causal(_with_random(layout_CC, draw), is_causal)


def bigbird_layout(
    num_blocks: int, *, sliding_blocks: int, global_blocks: int, draw: Draw, is_causal: bool = True
) -> Tensor:
    """Return a sliding window, global blocks at the start, and random blocks.

    Args:
        num_blocks: C.
        sliding_blocks: width of the window; half of it, rounded down, precedes a block, and as much follows.
        global_blocks: blocks at the start that all blocks see, and that see all blocks.
        draw: draws the random blocks of each block of queries.
        is_causal: blocks see only earlier blocks and themselves.
    """
    layout_CC = _with_global(_sliding(num_blocks, sliding_blocks), [(0, global_blocks)], has_rows=True)
    return _causal(_with_random(layout_CC, draw), is_causal)


def bslongformer_layout(
    num_blocks: int, *, sliding_blocks: int, global_ranges: Sequence[tuple[int, int]], is_causal: bool = True
) -> Tensor:
    """Return a sliding window, and global blocks that see all blocks and are visible to all.

    Args:
        num_blocks: C.
        sliding_blocks: width of the window; half of it, rounded down, precedes a block, and as much follows.
        global_ranges: (start, stop) of the global blocks.
        is_causal: blocks see only earlier blocks and themselves.
    """
    layout_CC = _with_global(_sliding(num_blocks, sliding_blocks), global_ranges, has_rows=True)
    return _causal(layout_CC, is_causal)


def _nothing(num_blocks: int) -> Tensor:
    return torch.zeros(num_blocks, num_blocks, dtype=torch.bool, device="cpu")


def _windows(num_blocks: int, sizes: Sequence[int]) -> Tensor:
    layout_CC = _nothing(num_blocks)
    start, place = 0, 0
    while start < num_blocks:
        stop = start + sizes[min(place, len(sizes) - 1)]
        layout_CC[start:stop, start:stop] = True
        start, place = stop, place + 1
    return layout_CC


def _sliding(num_blocks: int, width: int) -> Tensor:
    layout_CC = _nothing(num_blocks)
    for row in range(num_blocks):
        layout_CC[row, max(0, row - width // 2) : row + width // 2 + 1] = True
    return layout_CC


def _with_global(layout_CC: Tensor, ranges: Sequence[tuple[int, int]], *, has_rows: bool) -> Tensor:
    for start, stop in ranges:
        layout_CC[:, start:stop] = True
        if has_rows:
            layout_CC[start:stop] = True
    return layout_CC


def _with_random(layout_CC: Tensor, draw: Draw) -> Tensor:
    for row in range(len(layout_CC)):
        layout_CC[row, list(draw(row))] = True
    return layout_CC


def _causal(layout_CC: Tensor, is_causal: bool) -> Tensor:
    return layout_CC.tril() if is_causal else layout_CC
