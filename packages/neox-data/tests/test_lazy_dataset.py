from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neox_data.errors import DataError, IndexedDatasetError
from neox_data.indexed import IndexedDatasetWriter, open_indexed
from neox_data.lazy_dataset import LazyGPTDataset
from neox_data.sampler import BatchSampler
from support.refusals import refused


def lazy(
    prefix: Path, documents: range, *, name="train", num_samples=1, seq_length=4, seed=7
) -> LazyGPTDataset:
    return LazyGPTDataset(
        open_indexed(prefix), name=name, documents=documents, num_samples=num_samples,
        seq_length=seq_length, seed=seed,
    )  # fmt: skip


@pytest.fixture
def corpus(write_dataset) -> Path:
    """Documents of 0 to 6 tokens; the token is its place in the file."""
    sizes = [3, 0, 5, 1, 0, 0, 6, 4, 2, 6, 5, 0]
    ends = np.cumsum(sizes)
    return write_dataset([range(end - size, end) for end, size in zip(ends, sizes, strict=True)])


def test_an_epoch_is_every_window_once(corpus: Path) -> None:
    dataset = lazy(corpus, range(12), num_samples=20)
    # 32 tokens: 7 windows of 4 and the one after, and 3 tokens to spare.
    assert (dataset.samples_per_epoch, len(dataset)) == (7, 21)
    for epoch in range(3):
        firsts = sorted(dataset[7 * epoch + item][0].item() for item in range(7))
        assert firsts[0] <= 3
        assert firsts == list(range(firsts[0], firsts[0] + 28, 4))
    assert all(np.array_equal(dataset[k], dataset[k][0] + np.arange(5)) for k in range(21))
    assert dataset[0].dtype == np.int64


@pytest.mark.parametrize("documents", [range(13), range(-1, 12), range(20, 22)])
def test_documents_that_do_not_exist_are_refused(corpus: Path, documents: range) -> None:
    with refused(IndexedDatasetError, "documents 0", "11"):
        lazy(corpus, documents)


def test_epochs_differ_in_order_and_in_cuts(corpus: Path) -> None:
    dataset = lazy(corpus, range(12), num_samples=70)
    epochs = [tuple(dataset[7 * epoch + item][0].item() for item in range(7)) for epoch in range(10)]
    assert len(set(epochs)) == 10
    assert {min(epoch) for epoch in epochs} == {0, 1, 2, 3}


def test_items_do_not_depend_on_the_number_of_samples_or_access_order(corpus: Path) -> None:
    short, long = lazy(corpus, range(12), num_samples=7), lazy(corpus, range(12), num_samples=700)
    expected = [long[k].tolist() for k in range(21)]
    assert [short[k].tolist() for k in range(7)] == expected[:7]
    assert [long[k].tolist() for k in reversed(range(21))] == expected[::-1]


@pytest.mark.parametrize("change", [{"seed": 8}, {"name": "valid"}])
def test_seed_and_name_change_the_order(corpus: Path, change: dict[str, object]) -> None:
    one, other = lazy(corpus, range(12)), lazy(corpus, range(12), **change)
    assert [one.first_token(k) for k in range(7)] != [other.first_token(k) for k in range(7)]


def test_any_number_of_ranks_sees_the_same_samples(corpus: Path) -> None:
    dataset = lazy(corpus, range(12), num_samples=28)

    def seen(ranks: int, micro_batch: int, accumulation: int) -> list[int]:
        samplers = [
            BatchSampler(
                len(dataset), micro_batch=micro_batch, data_parallel_rank=rank, data_parallel_size=ranks,
                accumulation=accumulation,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        return [
            dataset.first_token(item)
            for iteration in range(3)
            for step in range(accumulation)
            for sampler in samplers
            for item in sampler.items(iteration, step)
        ]

    assert seen(1, 8, 1) == seen(2, 2, 2) == seen(4, 1, 2) == seen(8, 1, 1)


@settings(max_examples=30)
@given(st.data())
def test_pieces_are_the_tokens_of_the_item(tmp_path_factory, data) -> None:
    sizes = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=12))
    first = data.draw(st.integers(0, len(sizes) - 1))
    documents = range(first, data.draw(st.integers(first + 1, len(sizes))))
    seq_length = data.draw(st.integers(1, 5))
    prefix = tmp_path_factory.mktemp("lazy") / "c"
    with IndexedDatasetWriter(prefix, dtype="u2") as writer:
        writer.append_all(np.arange(sum(sizes)), sizes)
    if sum(sizes[d] for d in documents) <= seq_length:
        with refused(DataError, code="too-short"):
            lazy(prefix, documents, seq_length=seq_length)
        return
    dataset = lazy(prefix, documents, seq_length=seq_length)
    for item in range(len(dataset)):
        pieces = list(dataset.pieces(item))
        assert all(length > 0 and sequence in documents for sequence, _, length in pieces)
        parts = [dataset.indexed.get(*piece) for piece in pieces]
        assert np.concatenate(parts).tolist() == dataset[item].tolist()
    for sequence in range(len(sizes)):
        holding = [k for k in range(len(dataset)) if sequence in {piece[0] for piece in dataset.pieces(k)}]
        assert dataset.items_with(sequence).tolist() == holding


def test_no_file_is_written(corpus: Path) -> None:
    before = sorted(corpus.parent.iterdir())
    _ = lazy(corpus, range(12), num_samples=10**15)[10**15 - 1]
    assert sorted(corpus.parent.iterdir()) == before


def test_an_item_that_is_not_there_is_refused(corpus: Path) -> None:
    dataset = lazy(corpus, range(12))
    for item in (-1, len(dataset)):
        with refused(IndexError, f"item {item}", "'train'", "7"):
            dataset[item]


def test_sequences_that_do_not_follow_each_other_are_refused(corpus: Path) -> None:
    with refused(IndexedDatasetError, code="not-contiguous"):
        lazy(corpus, range(0, 12, 2))
