"""Layouts of the sparse attention types against drawings: a row per block of queries, x where it looks."""

import pytest
import torch

from neox_model.layers.attention import (
    bigbird_layout,
    bslongformer_layout,
    fixed_layout,
    random_blocks,
    variable_layout,
)


def drawn(layout: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in layout.tolist()]


def nothing(row: int) -> list[int]:
    return []


def test_fixed_windows_are_seen_later_through_their_last_block():
    assert drawn(fixed_layout(8, local_blocks=4, global_blocks=1)) == [
        "x.......",
        "xx......",
        "xxx.....",
        "xxxx....",
        "...xx...",
        "...xxx..",
        "...xxxx.",
        "...xxxxx",
    ]


def test_fixed_patterns_choose_other_blocks_of_a_window():
    assert drawn(fixed_layout(6, local_blocks=3, global_blocks=1, pattern=1)) == [
        "x.....",
        "xx....",
        "xxx...",
        ".x.x..",
        ".x.xx.",
        ".x.xxx",
    ]


def test_fixed_window_may_be_seen_through_several_blocks_and_the_last_window_may_be_short():
    assert drawn(fixed_layout(7, local_blocks=4, global_blocks=2)) == [
        "x......",
        "xx.....",
        "xxx....",
        "xxxx...",
        "..xxx..",
        "..xxxx.",
        "..xxxxx",
    ]


def test_variable_windows_have_their_sizes_and_the_last_repeats():
    assert drawn(variable_layout(7, windows=(1, 2), global_ranges=[(0, 1)], draw=nothing)) == [
        "x......",
        "xx.....",
        "xxx....",
        "x..x...",
        "x..xx..",
        "x....x.",
        "x....xx",
    ]


def test_variable_ranges_of_global_blocks_are_seen_from_their_start_on():
    assert drawn(variable_layout(6, windows=(2,), global_ranges=[(1, 3)], draw=nothing)) == [
        "x.....",
        "xx....",
        ".xx...",
        ".xxx..",
        ".xx.x.",
        ".xx.xx",
    ]


def test_bigbird_slides_and_sees_the_beginning():
    assert drawn(bigbird_layout(5, sliding_blocks=3, global_blocks=1, draw=nothing)) == [
        "x....",
        "xx...",
        "xxx..",
        "x.xx.",
        "x..xx",
    ]


def test_bigbird_adds_the_drawn_blocks():
    assert drawn(bigbird_layout(4, sliding_blocks=1, global_blocks=0, draw=lambda row: [row // 2])) == [
        "x...",
        "xx..",
        ".xx.",
        ".x.x",
    ]


def test_bslongformer_has_global_rows_and_columns():
    assert drawn(bslongformer_layout(6, sliding_blocks=3, global_ranges=[(2, 3)])) == [
        "x.....",
        "xx....",
        "xxx...",
        "..xx..",
        "..xxx.",
        "..x.xx",
    ]
    assert drawn(bslongformer_layout(4, sliding_blocks=1, global_ranges=[(3, 9)]))[3] == "xxxx"


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize(
    "layout",
    [
        lambda c: fixed_layout(c, local_blocks=4, global_blocks=2, pattern=1),
        lambda c: variable_layout(c, windows=(4,), global_ranges=[(5, 7)], draw=nothing),
        lambda c: bigbird_layout(c, sliding_blocks=5, global_blocks=4, draw=nothing),
        lambda c: bslongformer_layout(c, sliding_blocks=5, global_ranges=[(1, 8)]),
    ],
)
def test_a_window_shorter_than_the_pattern_sees_itself_and_nothing_later(layout, blocks):
    result = layout(blocks)
    assert result.diagonal().all()
    assert torch.equal(result, result.tril())


def test_random_blocks_depend_on_seed_layer_and_head_and_on_nothing_else():
    def draw(row, count=2, seed=1, layer=3, head=5):
        return list(random_blocks(count, seed=seed, layer=layer, head=head)(row))

    rows = [draw(row) for row in range(40)]
    torch.manual_seed(99)
    assert rows == [draw(row) for row in range(40)]
    for other in ({"seed": 2}, {"layer": 4}, {"head": 6}):
        assert rows != [draw(row, **other) for row in range(40)]
    for row, columns in enumerate(rows):
        assert len(set(columns)) == min(2, row + 1)
        assert all(0 <= column <= row for column in columns)
    assert sorted(draw(3, count=9)) == [0, 1, 2, 3]
