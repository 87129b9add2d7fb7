import os
import resource
from pathlib import Path

import numpy as np
import pytest

from neox_data.errors import IndexedDatasetError
from neox_data.indexed import IMPLEMENTATIONS, open_indexed
from support.refusals import refused


@pytest.mark.parametrize("implementation", ["infer", *IMPLEMENTATIONS])
def test_every_reader_gives_the_same(write_dataset, implementation: str) -> None:
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 60_000, size).tolist() for size in (4, 0, 1, 900, 17)]
    dataset = open_indexed(write_dataset(documents), implementation)
    assert [row.tolist() for row in dataset] == documents
    assert dataset.sizes.tolist() == [4, 0, 1, 900, 17]
    assert dataset.num_tokens == 922
    assert dataset.get(3, 200, 50).tolist() == documents[3][200:250]
    assert dataset.get(3, 890).tolist() == documents[3][890:]
    assert dataset.get(4, 17, 0).tolist() == []


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("place", [(-1, 0, None), (2, 0, None), (0, -1, 1), (0, 0, 4), (0, 3, 1), (0, 0, -1)])
def test_positions_out_of_range_are_refused(write_dataset, implementation: str, place) -> None:
    dataset = open_indexed(write_dataset([[1, 2, 3], [4]]), implementation)
    with refused(IndexError, "corpus, which has"):
        dataset.get(*place)


def test_a_file_that_may_not_be_read_is_named(write_dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_dataset([[1]])

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with refused(IndexedDatasetError, "corpus.idx", code="not-readable"):
        open_indexed(prefix)


def test_warming_up_reads_the_whole_file(write_dataset) -> None:
    assert open_indexed(write_dataset([[1, 2, 3]]), warmup=True)[0].tolist() == [1, 2, 3]


def test_an_unknown_implementation_is_refused(write_dataset) -> None:
    with refused(IndexedDatasetError, "data_impl 'nmap'"):
        open_indexed(write_dataset([[1]]), "nmap")


def test_tokens_cannot_be_changed_by_accident(write_dataset) -> None:
    row = open_indexed(write_dataset([[1]]))[0]
    with refused(ValueError, "read-only"):
        row[0] = 2


def test_a_lazy_dataset_notices_a_file_that_shrinks(write_dataset) -> None:
    prefix = write_dataset([[1, 2, 3]])
    dataset = open_indexed(prefix, "lazy")
    Path(f"{prefix}.bin").write_bytes(b"\1\0")
    with refused(IndexedDatasetError, "was truncated", code="truncated"):
        dataset[0]


@pytest.mark.parametrize("implementation", ["mmap", "lazy"])
def test_truncation_of_an_open_file_is_reported(write_dataset, implementation: str) -> None:
    prefix = write_dataset([[1] * 5000, [2] * 5000])
    dataset = open_indexed(prefix, implementation)
    os.truncate(f"{prefix}.bin", 100)
    reads = (
        lambda: dataset[1],
        lambda: dataset.get_across([0, 1], 0, 9),
        lambda: dataset.get_tokens(9000, 9),
    )
    for read in reads:
        with refused(IndexedDatasetError, "corpus.bin", code="truncated"):
            read()


def test_more_datasets_are_open_than_the_limit_of_open_files_at_first_allows(write_dataset) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    prefix = write_dataset([[1, 2]])
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        datasets = [open_indexed(prefix) for _ in range(120)]
        assert sum(len(dataset) for dataset in datasets) == 120
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_across_sequences_are_one_array(write_dataset, implementation: str) -> None:
    dataset = open_indexed(write_dataset([[1, 2, 3], [], [4, 5], [6, 7, 8]]), implementation)
    assert dataset.get_across([0, 1, 2, 3], 1, 0).tolist() == [2, 3, 4, 5, 6]
    assert dataset.get_across([3], 1, 2).tolist() == [7, 8]
    assert dataset.get_across([3, 0], 2, 1).dtype == np.int64
    for end in (2, -1):
        with refused(IndexError, "tokens 0", end, "sequence 2", "2"):
            dataset.get_across([2], 0, end)
    with pytest.raises(IndexError):
        dataset.get_across([0, -1], 0, 1)
