import pytest

from neox_data.batch_sizes import BatchSizes


@pytest.mark.parametrize("changes", [((0, 4),), ((0, 4), (3, 6)), ((0, 4), (3, 6), (4, 5), (10, 8))])
def test_items_and_iterations_agree_with_counting(changes: tuple[tuple[int, int], ...]) -> None:
    sizes, item, size = BatchSizes(changes), 0, 0
    for iteration in range(20):
        size = dict(changes).get(iteration, size)
        assert (sizes.at(iteration), sizes.first_item(iteration)) == (size, item)
        assert [sizes.iteration_of(item + place) for place in range(size)] == [iteration] * size
        item += size


def test_a_later_size_leaves_the_earlier_ones() -> None:
    sizes = BatchSizes().then(0, 4)
    assert sizes.then(3, 4) == sizes
    assert sizes.then(3, 6).changes == ((0, 4), (3, 6))
    # Resumed from an earlier checkpoint; changed before the first iteration.
    assert sizes.then(3, 6).then(2, 5).changes == ((0, 4), (2, 5))
    assert sizes.then(0, 5).changes == ((0, 5),)
