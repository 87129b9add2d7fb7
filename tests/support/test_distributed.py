import time

import pytest
import torch
import torch.distributed as dist

from support.distributed import DistributedFailure, run_ranks


def sum_of_ranks(start: int) -> list[int]:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return [dist.get_rank(), int(value)]


def rank_one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def sleep_for_ever() -> None:
    time.sleep(3600)


def test_each_rank_returns_its_value():
    assert run_ranks(sum_of_ranks, size=2, start=10) == [[0, 21], [1, 21]]


def test_the_first_error_is_reported_and_the_other_rank_ends():
    with pytest.raises(DistributedFailure, match=r"(?s)rank 1 failed.*ValueError: the reason"):
        run_ranks(rank_one_fails, size=2)


def test_the_time_limit_ends_the_run():
    with pytest.raises(DistributedFailure, match=r"did not end within 3 s"):
        run_ranks(sleep_for_ever, size=1, timeout_seconds=3)
