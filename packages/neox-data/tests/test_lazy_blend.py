import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neox_data.lazy_blend import LazyBlendedDataset, SpreadPoints
from support.refusals import refused


class Numbers:
    """Item k of dataset `first` is the array [first + k]."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> np.ndarray:
        assert 0 <= item < self.length
        return np.array([self.first + item])


def test_items_belong_to_the_owners_of_mirrored_numbers() -> None:
    # 0, .1, .01, .11, .001, .101, .011, .111 are 0, 4, 2, 6, 1, 5, 3, 7 eighths.
    points = SpreadPoints([1, 2, 5])
    assert [points.owner(item) for item in range(8)] == [0, 2, 1, 2, 1, 2, 2, 2]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 600))
def test_counts_match_the_items(shares: list[int], items: int) -> None:
    points, taken = SpreadPoints(shares), [0] * len(shares)
    for item in range(items):
        owner = points.owner(item)
        assert points.taken(item, owner) == taken[owner]
        if item % 29 == 0:
            assert points.item_of(owner, taken[owner]) == item
        taken[owner] += 1
    assert [points.taken(items, owner) for owner in range(len(shares))] == taken


def test_every_stretch_has_its_shares_up_to_a_few_items() -> None:
    shares = [0.5, 0.3, 0.15, 0.05]
    points = SpreadPoints(shares)
    for first, stretch in ((0, 100), (12_345, 1000), (10**15, 10_000)):
        for owner, share in enumerate(shares):
            count = points.taken(first + stretch, owner) - points.taken(first, owner)
            assert abs(count - share * stretch) < 12


def test_datasets_are_built_for_the_number_of_samples_taken() -> None:
    blend = LazyBlendedDataset(lambda number, count: Numbers(1000 * number, count), [1, 0, 3], 400)
    seen = [blend[item].item() for item in range(len(blend))]
    assert sorted(seen) == [*range(len(blend.datasets[0])), *range(2000, 2000 + len(blend.datasets[2]))]
    assert [len(dataset) for dataset in blend.datasets] == [100, 0, 300]
    assert [blend.items_of(2, place) for place in range(301)] == [
        *([item] for item, number in enumerate(seen) if number >= 2000),
        [],
    ]


def test_the_order_does_not_depend_on_the_number_of_samples() -> None:
    def places(count: int) -> list[tuple[int, int]]:
        blend = LazyBlendedDataset(lambda number, count: Numbers(number, count), [0.2, 0.8], count)
        return [blend.locate(item) for item in range(50)]

    assert places(50) == places(10**12)


@pytest.mark.parametrize("item", [-1, 3])
def test_an_item_that_is_not_there_is_refused(item: int) -> None:
    with refused(IndexError, f"item {item}", "3"):
        LazyBlendedDataset(lambda number, count: Numbers(number, count), [1], 3)[item]
