"""Where one stored range and one wanted range of the same tensor meet.

A row-major range of an N-dimensional block is at most 2N - 1 boxes that are contiguous in memory (part of
a row, whole rows, part of a row). Two ranges are compared box by box, so any split can be read by any other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from neox_model.checkpoint.contents import Block, block_numel

__all__ = ["Box", "Overlap", "Range", "boxes", "find_overlaps"]

# A block of the whole tensor, and a row-major range inside the block.
Range = tuple[Block, int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of the whole tensor that lies contiguously at `offset` of a flat buffer."""

    bounds: Block
    offset: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a box of the source and a box of the target have in common."""

    source: Box
    target: Box
    shared: Block

    @property
    def numel(self) -> int:
        """Number of shared elements."""
        return block_numel(self.shared)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the shared elements from one flat tensor to another, converting the dtype."""
        _view(target, self.target, self.shared).copy_(_view(source, self.source, self.shared))


def boxes(block: Block, start: int, stop: int) -> Iterator[Box]:
    """Split the row-major range `[start, stop)` of a block into boxes; offsets count from `start`."""
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
    """The boxes that a stored and a wanted range have in common; empty when they do not meet."""
    if _intersection(stored[0], wanted[0]) is None:
        return []
    pairs = ((source, target) for source in boxes(*stored) for target in boxes(*wanted))
    found = ((source, target, _intersection(source.bounds, target.bounds)) for source, target in pairs)
    return [Overlap(source, target, shared) for source, target, shared in found if shared is not None]


def _intersection(one: Block, other: Block) -> Block | None:
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def _view(flat: Tensor, box: Box, shared: Block) -> Tensor:
    shape = [stop - start for start, stop in box.bounds]
    whole = flat.narrow(0, box.offset, block_numel(box.bounds)).view(shape)
    return whole[
        tuple(
            slice(start - low, stop - low) for (start, stop), (low, _) in zip(shared, box.bounds, strict=True)
        )
    ]
