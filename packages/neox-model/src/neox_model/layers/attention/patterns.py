"""Which earlier tokens a token may look at, as functions of places.

A pattern is `pattern(head, query, key) -> whether the query sees the key`, on integer tensors of any shapes
that broadcast: over whole ranges it makes a dense mask, and FlexAttention calls it for single places.
Causality is not its matter.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from neox_model.parallel.groups import SINGLE, Group

__all__ = ["BlockPattern", "LocalPattern", "Pattern"]


class Pattern(nn.Module, ABC):
    """Base of the patterns.

    Attributes:
        num_masks: 1 where all heads see alike, else the heads of this rank.
    """

    num_masks = 1

    @abstractmethod
    def forward(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether head number `head` of this rank lets place `query` see place `key`."""


class LocalPattern(Pattern):
    """A token sees its own block and the `blocks_before` blocks before it.

    Args:
        block: tokens of a block.
        blocks_before: whole blocks before a token's own.
    """

    def __init__(self, *, block: int, blocks_before: int) -> None:
        super().__init__()
        self.block = block
        self.blocks_before = blocks_before

    def forward(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether the two places are in blocks that are near enough."""
        return query // self.block - key // self.block <= self.blocks_before


class BlockPattern(Pattern):
    """A token sees the blocks that a layout gives its own block; a shorter window is its first part.

    Args:
        num_blocks: blocks of the longest window.
        block: tokens of a block.
        layout: function of (number of blocks, the head's place among all heads) that gives a layout
            [blocks, blocks] (see block_layouts).
        heads: heads of the whole layer.
        is_per_head: every head has a layout of its own; else all have the first head's.
        group: the ranks the heads are split over.
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
        group: Group = SINGLE,
    ) -> None:
        super().__init__()
        self.block = block
        local_heads = heads // group.size
        first = group.rank * local_heads
        numbers: Sequence[int] = range(first, first + local_heads) if is_per_head else (0,)
        self.num_masks = len(numbers)
        layouts = torch.stack([layout(num_blocks, head) for head in numbers])
        # It follows from the configuration, so no checkpoint holds it.
        self.register_buffer("layout", layouts.to(torch.get_default_device()), persistent=False)

    def forward(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether the layout has the key's block in the row of the query's."""
        row, column = query // self.block, key // self.block
        if self.num_masks == 1:
            return self.layout[0, row, column]
        return self.layout[head, row, column]
