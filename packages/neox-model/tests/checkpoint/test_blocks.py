"""Any stored range against any wanted range, compared with indexing the whole tensor."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neox_model.checkpoint.blocks import Range, boxes, find_overlaps

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def _block(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((low, high) for low, high in bounds)


@st.composite
def shape_and_two_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], Range, Range]:
    shape = draw(SHAPES)
    ranges = []
    for _ in range(2):
        block = _block(draw, shape)
        numel = prod(high - low for low, high in block)
        start, stop = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
        ranges.append((block, start, stop))
    return shape, ranges[0], ranges[1]


def _places(shape: tuple[int, ...], wanted: Range) -> torch.Tensor:
    """Flat places in the whole tensor of a range's elements."""
    block, start, stop = wanted
    whole = torch.arange(prod(shape)).view(shape)
    return whole[tuple(slice(low, high) for low, high in block)].reshape(-1)[start:stop]


@settings(deadline=None, max_examples=300)
@given(shape_and_two_ranges())
def test_elements_in_both_ranges_are_copied(case):
    shape, stored, wanted = case
    source, places = _places(shape, stored), _places(shape, wanted)
    target = torch.full_like(places, -1)
    overlaps = find_overlaps(stored, wanted)
    for overlap in overlaps:
        overlap.copy(source, target)
    expected = torch.where(torch.isin(places, source), places, -1)
    assert target.tolist() == expected.tolist()
    assert sum(overlap.numel for overlap in overlaps) == int((expected >= 0).sum())


def test_a_range_is_few_boxes():
    found = list(boxes(((10, 14), (0, 5)), 3, 17))
    assert [(box.bounds, box.offset) for box in found] == [
        (((10, 11), (3, 5)), 0),
        (((11, 13), (0, 5)), 2),
        (((13, 14), (0, 2)), 12),
    ]
