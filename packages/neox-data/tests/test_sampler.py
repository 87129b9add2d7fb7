import pytest

from neox_data.errors import DataError
from neox_data.sampler import BatchSampler
from support.refusals import refused


def sampler(num_samples: int, rank: int = 0, **changes: int) -> BatchSampler:
    arguments = {"micro_batch": 2, "data_parallel_size": 3, "accumulation": 2} | changes
    return BatchSampler(num_samples, data_parallel_rank=rank, **arguments)


def test_each_rank_takes_its_slice_of_the_batch() -> None:
    assert [list(sampler(100, rank).items(0, 0)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_micro_steps_follow_one_another() -> None:
    first = sampler(100)
    places = [first.items(iteration, step).start for iteration in range(2) for step in range(2)]
    assert places == [0, 6, 12, 18]


def test_the_ranks_together_read_every_item_once_in_order() -> None:
    ranks = [sampler(48, rank) for rank in range(3)]
    items = [item for i in range(4) for m in range(2) for rank in ranks for item in rank.items(i, m)]
    assert items == list(range(48))


def test_resuming_needs_the_iteration_alone() -> None:
    running, resumed = sampler(1000), sampler(1000)
    for iteration in range(7):
        running.items(iteration, 0)
    assert running.items(7, 1) == resumed.items(7, 1) == range(7 * 12 + 6, 7 * 12 + 8)


def test_the_last_incomplete_batch_is_dropped_and_the_first_follows() -> None:
    short = sampler(5 * 6 + 5)
    assert short.num_batches == 5
    assert [short.items(2, step).start for step in range(2)] == [24, 0]
    assert short.items(3, 0).start == 6


def test_the_same_items_make_a_batch_for_any_number_of_ranks() -> None:
    one = BatchSampler(96, micro_batch=6, data_parallel_rank=0, data_parallel_size=1, accumulation=2)
    for iteration in range(3):
        together = [item for rank in range(3) for item in sampler(96, rank).items(iteration, 1)]
        assert together == list(one.items(iteration, 1))


@pytest.mark.parametrize("start", [12, 7, 1])
def test_another_batch_size_continues_at_the_next_sample(start: int) -> None:
    ranks = [sampler(61, rank, start=start) for rank in range(3)]
    read = [item for i in range(4) for m in range(2) for rank in ranks for item in rank.items(i, m)]
    assert read == list(range(start, start + 48))


@pytest.mark.parametrize("start", [0, 3, 5, 6, 29])
def test_last_sample_is_read_for_any_start(start: int) -> None:
    """A data set that holds exactly what is left is read to its end, and never from its beginning."""
    num_samples = start + 4 * 12
    ranks = [sampler(num_samples, rank, start=start) for rank in range(3)]
    read = [item for i in range(4) for m in range(2) for rank in ranks for item in rank.items(i, m)]
    assert read == list(range(start, num_samples))


def test_items_restart_after_the_last_batch_for_any_start() -> None:
    ranks = [sampler(20, rank, start=4) for rank in range(3)]
    read = [item for i in range(2) for m in range(2) for rank in ranks for item in rank.items(i, m)]
    # Two batches fit after item 4; items 16 to 19 do not fill a third.
    assert read == [*range(4, 16), *range(12)]


def test_data_that_does_not_fill_a_batch_is_refused() -> None:
    with refused(DataError, "5 samples", "3 data-parallel", "2 each"):
        sampler(5)
