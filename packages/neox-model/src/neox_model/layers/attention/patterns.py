"""Attention patterns: the visible keys, as functions of positions.

A pattern is `pattern(head, query, key) -> True if the query sees the key`, on integer tensors of any shapes
that broadcast: on whole ranges it computes a dense mask, and FlexAttention calls it for single positions.
Patterns do not include causality.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = ["BlockPattern", "LocalPattern", "Pattern"]


class Pattern(nn.Module, ABC):
    """Base class of patterns.

    Attributes:
        num_masks: 1 if all heads have the same pattern, else the number of heads of this rank.
        key: equal for patterns that show the same keys.
    """

    num_masks = 1
    key: Hashable

    @abstractmethod
    def forward(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return True where position `query` sees position `key` in head `head` of this rank."""


class LocalPattern(Pattern):
    """A pattern in which a token sees its block and the `blocks_before` blocks before it.

    Args:
        block: tokens per block.
        blocks_before: number of visible blocks before a token's block.
        both_ways: equally many blocks after it are visible; False: all later blocks are, and causality hides
            them.
    """

    def __init__(self, *, block: int, blocks_before: int, both_ways: bool = False) -> None:
        super().__init__()
        self.block = block
        self.blocks_before = blocks_before
        self.both_ways = both_ways
        self.key = (block, blocks_before, both_ways)

    def forward(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return True where the key's block is close enough to the query's."""
        distance = query // self.block - key // self.block
        return (distance.abs() if self.both_ways else distance) <= self.blocks_before


class BlockPattern(Pattern):
    """A pattern from a layout of blocks; shorter windows use its first part.

    Args:
        num_blocks: blocks of the longest window.
        block: tokens per block.
        layout: function of (number of blocks, index of the head among all heads) that returns a layout
            [blocks, blocks] (see block_layouts).
        heads: heads of the whole layer.
        is_per_head: use a separate layout for every head; otherwise all use the first head's.
        group: the ranks over which the heads are split.
    """

    layout: Tensor

    def __init__(
        self,
        *,
        num_blocks: int,
        block: int,
        layout: Callable[[int, int], Tensor],
        heads: int,
        is_per_head: bool = False,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.block = block
        local_heads = heads // group.size
        first = group.rank * local_heads
        numbers: Sequence[int] = range(first, first + local_heads) if is_per_head else (0,)
        self.num_masks = len(numbers)
        layouts = torch.stack([layout(num_blocks, head) for head in numbers])
        self.key = (block, tuple(layouts.shape), layouts.numpy().tobytes())
        # It follows from the configuration, so it is not saved in checkpoints.
        self.register_buffer("layout", layouts.to(torch.get_default_device()), persistent=False)

    def forward(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return True where the layout includes the key's block in the row of the query's block."""
        row, column = query // self.block, key // self.block
        if self.num_masks == 1:
            return self.layout[0, row, column]
        return self.layout[head, row, column]
