import pytest

from neox_model.train.callbacks.stragglers import RankReport, slowest


def reports(seconds, *, stages=1, tensor=1):
    """Report times in the order of ranks: stage, then replica, then tensor-parallel rank."""
    per_stage = len(seconds) // stages
    return [
        RankReport(
            rank=rank,
            host=f"host-{rank // 2}",
            stage=rank // per_stage,
            members=tuple(range(rank - rank % tensor, rank - rank % tensor + tensor)),
            seconds=time,
            peak_bytes=0.0,
        )
        for rank, time in enumerate(seconds)
    ]


def test_the_slowest_rank_is_compared_with_the_median():
    found = slowest(reports([1.0, 1.1, 3.0, 0.9, 1.2]))
    assert (found.ranks, found.hosts, found.seconds, found.median) == ((2,), ("host-1",), 3.0, 1.1)
    assert found.factor == pytest.approx(3 / 1.1)
    assert str(found) == "rank 2 (host-1)"


def test_of_two_ranks_the_median_is_the_faster():
    assert slowest(reports([1.0, 3.0])).factor == 3.0
    assert slowest(reports([2.0, 2.0])).factor == 1.0


def test_stages_with_different_work_are_not_compared():
    # The last stage, ranks 2 and 3, has more work.
    assert slowest(reports([1.0, 1.0, 5.0, 5.0], stages=2)).factor == 1.0
    found = slowest(reports([1.0, 1.5, 5.0, 5.5], stages=2))
    assert (found.ranks, found.factor) == ((1,), 1.5)
    assert slowest(reports([1.0, 9.0], stages=2)) is None


def test_tensor_parallel_ranks_are_named_together():
    found = slowest(reports([1.0, 1.01, 2.99, 3.0], tensor=2))
    assert (found.ranks, found.median) == ((2, 3), 1.01)
    assert str(found) == "ranks 2, 3 (host-1)"
    assert slowest(reports([1.0, 9.0], tensor=2)) is None


def test_ranks_without_a_measurement_are_left_out():
    assert slowest(reports([None, None])) is None
    assert slowest(reports([None, 2.0])) is None
    assert slowest(reports([None, 2.0, 3.0])).factor == 1.5
