"""Compute the overlaps of stored and requested ranges of a tensor.

A row-major range of an N-dimensional block consists of at most 2N - 1 boxes that are contiguous in memory
(part of a row, whole rows, part of a row). Ranges are compared box by box, so any split can be read into any
other.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Block",
    "Box",
    "Overlap",
    "Range",
    "block_numel",
    "boxes",
    "find_overlaps",
    "overlapping",
    "whole_block",
]

# One interval per dimension of the whole tensor.
Block = tuple[tuple[int, int], ...]

# A block of the whole tensor, and a row-major range inside the block.
Range = tuple[Block, int, int]


def block_numel(block: Block) -> int:
    """Return the number of elements in a block; 1 for a tensor without dimensions."""
    return prod(stop - start for start, stop in block)


def whole_block(shape: tuple[int, ...]) -> Block:
    """Return the block that is a whole tensor."""
    return tuple((0, length) for length in shape)


@dataclass(frozen=True, slots=True)
class Box:
    """A block of the whole tensor, stored contiguously at `offset` of a flat buffer."""

    bounds: Block
    offset: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """The block shared by a box of the source and a box of the target."""

    source: Box
    target: Box
    shared: Block

    @property
    def numel(self) -> int:
        """Return the number of shared elements."""
        return block_numel(self.shared)

    def copy(self, source: "Tensor", target: "Tensor") -> None:
        """Copy the shared elements from one flat tensor to another, converting the dtype."""
        _view(target, self.target, self.shared).copy_(_view(source, self.source, self.shared))


def boxes(block: Block, start: int, stop: int) -> Iterator[Box]:
    """Split the row-major range `[start, stop)` of a block into boxes; offsets are relative to `start`."""
    if start >= stop:
        return
    if not block:
        yield Box((), 0)
        return
    (first_row, _), inner = block[0], block[1:]
    row_numel = block_numel(inner)
    position = start
    while position < stop:
        row, column = divmod(position, row_numel)
        whole_rows = 0 if column else (stop - position) // row_numel
        if whole_rows:
            rows = (first_row + row, first_row + row + whole_rows)
            yield Box((rows, *inner), position - start)
            position += whole_rows * row_numel
            continue
        part_end = min(row_numel, column + stop - position)
        for box in boxes(inner, column, part_end):
            rows = (first_row + row, first_row + row + 1)
            yield Box((rows, *box.bounds), position - start + box.offset)
        position += part_end - column


def find_overlaps(stored: Range, wanted: Range) -> list[Overlap]:
    """Return the overlaps of the boxes of a stored and a requested range."""
    if _intersection(stored[0], wanted[0]) is None:
        return []
    pairs = ((source, target) for source in boxes(*stored) for target in boxes(*wanted))
    found = ((source, target, _intersection(source.bounds, target.bounds)) for source, target in pairs)
    return [Overlap(source, target, shared) for source, target, shared in found if shared is not None]


def overlapping(ranges: Iterable[Range]) -> bool:
    """Return whether two of these ranges of one tensor have an element in common."""
    by_block: dict[Block, list[tuple[int, int]]] = defaultdict(list)
    for block, start, stop in ranges:
        if start < stop:
            by_block[block].append((start, stop))
    for parts in by_block.values():
        parts.sort()
        if any(first[1] > second[0] for first, second in pairwise(parts)):
            return True
    blocks = sorted(by_block)
    for number, one in enumerate(blocks):
        for other in blocks[number + 1 :]:
            if other[0][0] >= one[0][1]:
                break
            pairs = product(by_block[one], by_block[other])
            if any(find_overlaps((one, *first), (other, *second)) for first, second in pairs):
                return True
    return False


def _intersection(one: Block, other: Block) -> Block | None:
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def _view(flat: "Tensor", box: Box, shared: Block) -> "Tensor":
    shape = [stop - start for start, stop in box.bounds]
    whole = flat.narrow(0, box.offset, block_numel(box.bounds)).view(shape)
    return whole[
        tuple(
            slice(start - low, stop - low) for (start, stop), (low, _) in zip(shared, box.bounds, strict=True)
        )
    ]
