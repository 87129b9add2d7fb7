"""The native reader gives what the plain way gives, and leaves to it what it cannot give."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from neox_data.errors import IndexedDatasetError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import IndexedDataset, open_indexed
from neox_data.native import load_native
from neox_data.samples.build_index import SampleIndex, build_sample_index
from neox_data.samples.native_reader import native_sample_reader
from support.refusals import refused

pytestmark = pytest.mark.skipif(load_native() is None, reason="the extension was not built")

SEQ_LENGTH = 7


@pytest.fixture
def sizes() -> list[int]:
    return np.random.default_rng(2).integers(0, 20, 60).tolist()


def order(indexed: IndexedDataset) -> SampleIndex:
    return build_sample_index(
        np.arange(len(indexed)), indexed.sizes, num_samples=200, seq_length=SEQ_LENGTH, seed=5
    )


def plainly(indexed: IndexedDataset, index: SampleIndex, item: int) -> list[int]:
    (first, offset), (last, end) = index.starts[index.shuffle[item] : index.shuffle[item] + 2].tolist()
    return indexed.get_across(index.documents[first : last + 1].tolist(), offset, end).tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
@pytest.mark.parametrize("implementation", ["mmap", "cached"])
def test_tokens_of_every_dtype_equal_the_python_reader(
    write_dataset, sizes: list[int], dtype: str, implementation: str
) -> None:
    limits, random = np.iinfo(dtype), np.random.default_rng(3)
    rows = [random.integers(limits.min, limits.max, size, dtype).tolist() for size in sizes]
    indexed = open_indexed(write_dataset(rows, dtype), implementation)
    index = order(indexed)
    wide = SampleIndex(index.documents, index.starts.astype(np.int64), index.shuffle.astype(np.int64))
    for one in (index, wide):
        read = native_sample_reader(indexed, one, seq_length=SEQ_LENGTH)
        for item in range(len(index.shuffle)):
            tokens = read(item)
            assert tokens.dtype == np.int64
            assert tokens.tolist() == plainly(indexed, index, item)


def test_inconsistent_index_is_left_to_the_python_reader(write_dataset, sizes: list[int]) -> None:
    indexed = open_indexed(write_dataset([[1] * size for size in sizes]))
    index = order(indexed)
    last = len(index.documents) - 1
    damaged = [
        replace(index, documents=np.full_like(index.documents, -1)),
        replace(index, documents=np.full_like(index.documents, len(sizes))),
        replace(index, shuffle=np.full_like(index.shuffle, len(index.shuffle))),
        replace(index, shuffle=np.full_like(index.shuffle, 2**32 - 1)),
        replace(index, shuffle=np.full(len(index.shuffle), 2**63 - 1)),
        replace(index, shuffle=np.full(len(index.shuffle), -1)),
        replace(index, starts=index.starts + np.array([0, 1000])),
        replace(index, starts=index.starts - np.array([0, 1000])),
        replace(index, starts=index.starts + np.array([last, 0])),
        replace(index, starts=index.starts * 0),
    ]
    for one in damaged:
        one = replace(one, starts=one.starts.astype(np.int32))
        assert native_sample_reader(indexed, one, seq_length=SEQ_LENGTH)(0) is None
    read = native_sample_reader(indexed, index, seq_length=SEQ_LENGTH)
    assert read(0) is not None
    assert read(-1) is None
    assert read(len(index.shuffle)) is None
    assert native_sample_reader(indexed, index, seq_length=SEQ_LENGTH + 1)(0) is None


def test_offset_outside_the_bin_is_reported_by_the_python_reader(write_dataset) -> None:
    prefix = write_dataset([[1, 2, 3, 4], [5, 6, 7, 8, 9]])
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    for offset in (-2, 1, 16, 2**62):
        data[34 + 8 + 8 : 34 + 8 + 16] = offset.to_bytes(8, "little", signed=True)
        path.write_bytes(data)
        dataset = GPTDataset(
            open_indexed(prefix), name="train", documents=np.arange(2), num_samples=1, seq_length=8, seed=1,
            prefix=prefix,
        )  # fmt: skip
        with refused(IndexedDatasetError, "sequence 1", f"byte {offset:,}"):
            dataset[0]


def test_a_file_read_piece_by_piece_has_no_native_reader(write_dataset, sizes: list[int]) -> None:
    indexed = open_indexed(write_dataset([[1] * size for size in sizes]), "lazy")
    assert native_sample_reader(indexed, order(indexed), seq_length=SEQ_LENGTH)(0) is None
