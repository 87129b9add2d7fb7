import threading
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from neox_data.errors import DataError  # noqa: E402
from neox_data.loader import PrefetchLoader  # noqa: E402
from neox_data.sampler import BatchSampler  # noqa: E402
from support.refusals import refused  # noqa: E402


class Windows:
    """Item k is [k, k + 1, k + 2]."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, item: int) -> np.ndarray:
        return np.arange(item, item + 3, dtype=np.int64)


class Broken(Windows):
    def __getitem__(self, item: int) -> np.ndarray:
        if item == 13:
            raise DataError("item 13 is broken")
        return super().__getitem__(item)


SAMPLER = BatchSampler(60, micro_batch=2, data_parallel_rank=1, data_parallel_size=2, accumulation=3)


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_micro_batches_come_in_the_samplers_order(num_threads: int) -> None:
    loader = PrefetchLoader(Windows(), SAMPLER, num_threads=num_threads)
    batches = list(islice(loader, 8))
    loader.close()
    expected = [SAMPLER.items(iteration, step) for iteration in range(3) for step in range(3)][:8]
    assert [batch[:, 0].tolist() for batch in batches] == [list(items) for items in expected]
    assert all(batch.shape == (2, 3) and batch.dtype == torch.int64 for batch in batches)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_micro_batches_are_prepared_in_the_threads(num_threads: int) -> None:
    names: set[str] = set()

    def prepare(tokens: torch.Tensor) -> list[int]:
        names.add(threading.current_thread().name.partition("_")[0])
        return tokens[:, 0].tolist()

    loader = PrefetchLoader(Windows(), SAMPLER, num_threads=num_threads, prepare=prepare)
    assert next(loader) == list(SAMPLER.items(0, 0))
    loader.close()
    assert names == {"prefetch" if num_threads else "MainThread"}


def test_closing_ends_the_threads() -> None:
    loader = PrefetchLoader(Windows(), SAMPLER, num_threads=3)
    next(loader)
    assert prefetch_threads()
    loader.close()
    assert not prefetch_threads()
    with refused(DataError, code="closed"):
        next(loader)
    loader.close()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_error_is_raised_at_its_micro_batch_and_closes_the_loader(num_threads: int) -> None:
    # Items 2, 3 | 6, 7 | 10, 11 || 14, 15: with rank 0 instead of 1, micro batch 3 holds item 13.
    sampler = BatchSampler(60, micro_batch=2, data_parallel_rank=0, data_parallel_size=2, accumulation=3)
    loader = PrefetchLoader(Broken(), sampler, num_threads=num_threads)
    assert [next(loader)[:, 0].tolist() for _ in range(3)] == [[0, 1], [4, 5], [8, 9]]
    with refused(DataError, "item 13"):
        next(loader)
    assert not prefetch_threads()
    with refused(DataError, code="closed"):
        next(loader)
