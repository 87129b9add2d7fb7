from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from neox_data.errors import DataError, IndexedDatasetError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import open_indexed
from support.refusals import refused

DOCUMENTS = [[10, 11, 12], [], [20, 21, 22, 23, 24], [30], [40, 41, 42, 43, 44, 45, 46]]


@pytest.fixture
def prefix(write_dataset) -> Path:
    return write_dataset(DOCUMENTS)


def make(prefix: Path, implementation: str = "infer", **changes) -> GPTDataset:
    arguments = {"documents": np.arange(5), "num_samples": 9, "seq_length": 4, "seed": 11} | changes
    return GPTDataset(open_indexed(prefix, implementation), name="train", prefix=prefix, **arguments)


@pytest.mark.parametrize("implementation", ["mmap", "lazy", "cached"])
def test_items_are_windows_of_the_shuffled_documents(prefix: Path, implementation: str) -> None:
    dataset = make(prefix, implementation)
    # 16 tokens an epoch; (3 * 16 - 1) // 4 = 11 samples are the first count of at least 9.
    assert len(dataset) == 11
    random = np.random.RandomState(11)
    order = np.tile(np.arange(5, dtype=np.int32), 3)
    random.shuffle(order)
    stream = [token for document in order for token in DOCUMENTS[document]]
    places = np.arange(11)
    random.shuffle(places)
    for item, place in enumerate(places):
        assert dataset[item].tolist() == stream[4 * place : 4 * place + 5]
    assert dataset[0].dtype == np.int64


def test_only_the_named_documents_are_used(prefix: Path) -> None:
    dataset = make(prefix, documents=np.array([2, 3]))
    assert {token for item in range(len(dataset)) for token in dataset[item].tolist()} == {
        20,
        21,
        22,
        23,
        24,
        30,
    }


@pytest.mark.parametrize("documents", [[0, 5], [-1, 2], [2**40], [2**32]])
def test_documents_that_do_not_exist_are_refused(prefix: Path, documents: list[int]) -> None:
    with refused(IndexedDatasetError, f"{min(documents):,} to {max(documents):,}", "0 to 4"):
        make(prefix, documents=np.array(documents))


def test_pieces_contain_the_origin_of_an_item(prefix: Path) -> None:
    dataset = make(prefix)
    for item in range(len(dataset)):
        pieces = list(dataset.pieces(item))
        assert sum(length for _, _, length in pieces) == 5
        tokens = [DOCUMENTS[sequence][offset : offset + length] for sequence, offset, length in pieces]
        assert dataset[item].tolist() == list(chain.from_iterable(tokens))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("seq_length", [1, 3, 4, 20])
def test_items_of_a_sequence_match_the_pieces(prefix: Path, seq_length: int, seed: int) -> None:
    dataset = make(prefix, documents=np.array([0, 1, 2, 4]), num_samples=20, seq_length=seq_length, seed=seed)
    for sequence in range(5):
        holding = [
            item
            for item in range(len(dataset))
            if any(of == sequence and length for of, _, length in dataset.pieces(item))
        ]
        assert dataset.items_with(sequence).tolist() == holding


def test_the_second_time_the_cached_index_gives_the_same(prefix: Path) -> None:
    first, second = make(prefix), make(prefix)
    assert [first[i].tolist() for i in range(11)] == [second[i].tolist() for i in range(11)]


@pytest.mark.parametrize("item", [-1, 11])
def test_an_item_that_is_not_there_is_refused(prefix: Path, item: int) -> None:
    with refused(IndexError, f"item {item}", "'train'", "11"):
        make(prefix)[item]


def test_a_part_without_documents_is_refused(prefix: Path) -> None:
    with refused(DataError, "'train'"):
        make(prefix, documents=np.arange(0))
