import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neox_data.errors import DataError
from neox_data.native import load_native
from neox_data.samples.build_index import NUMPY, build_sample_index, num_epochs, sample_dtype, shuffle_dtype
from neox_data.samples.native_index import best_builder
from support.refusals import refused


def slow_order(documents, sizes, num_samples, seq_length, seed):
    """Return the documented order, computed one token at a time."""
    tokens_per_epoch = sum(sizes[d] for d in documents)
    epochs = 1
    while (epochs * tokens_per_epoch - 1) // seq_length < num_samples:
        epochs += 1
    random = np.random.RandomState(seed)
    stream = np.array(list(documents) * epochs, dtype=np.int32)
    random.shuffle(stream)
    places = [(index, offset) for index, d in enumerate(stream) for offset in range(sizes[d])]
    count = (epochs * tokens_per_epoch - 1) // seq_length
    starts = [(0, 0)] + [places[i * seq_length] for i in range(1, count + 1)]
    shuffle = np.arange(count, dtype=np.uint32)
    random.shuffle(shuffle)
    return stream, starts, shuffle


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(sum),
    num_samples=st.integers(0, 120),
    seq_length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_the_order_is_the_documented_one(sizes, num_samples, seq_length, seed, data) -> None:
    first = data.draw(st.integers(0, len(sizes) - 1))
    stop = data.draw(st.integers(first + 1, len(sizes)))
    documents = range(first, stop)
    if not sum(sizes[first:stop]):
        documents = range(len(sizes))
    stream, starts, shuffle = slow_order(documents, sizes, num_samples, seq_length, seed)
    for builder in (NUMPY, best_builder()):
        index = build_sample_index(
            np.array(documents),
            np.array(sizes, np.int32),
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            builder=builder,
        )
        assert index.documents.tolist() == stream.tolist()
        assert index.starts.tolist() == [list(place) for place in starts]
        assert index.shuffle.tolist() == shuffle.tolist()
        dtypes = (index.documents.dtype, index.starts.dtype, index.shuffle.dtype)
        assert dtypes == (np.int32, np.int32, np.uint32)


@pytest.mark.skipif(load_native() is None, reason="the extension was not built")
def test_the_native_index_is_numpys_on_a_larger_corpus() -> None:
    sizes = np.random.default_rng(1).integers(0, 900, 20_000).astype(np.int32)
    order = {"num_samples": 100_000, "seq_length": 256, "seed": 1234}
    native = build_sample_index(np.arange(20_000), sizes, builder=best_builder(), **order)
    plain = build_sample_index(np.arange(20_000), sizes, **order)
    for part in ("documents", "starts", "shuffle"):
        np.testing.assert_array_equal(getattr(native, part), getattr(plain, part))


@pytest.mark.skipif(load_native() is None, reason="the extension was not built")
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1])
def test_the_native_shuffles_are_numpys_one_after_another(dtype, seed: int) -> None:
    ours, numpys = best_builder().shuffler(seed), np.random.RandomState(seed)
    for size in (0, 1, 2, 3, 64, 65, 1025, 5000, 2, 70_000, 1 << 16):
        one, two = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
        ours.shuffle(one)
        numpys.shuffle(two)
        np.testing.assert_array_equal(one, two)


def test_a_fixed_example_never_changes() -> None:
    index = build_sample_index(
        np.arange(4), np.array([3, 0, 5, 4], np.int32), num_samples=4, seq_length=4, seed=1234
    )
    assert index.documents.tolist() == [2, 1, 2, 0, 0, 1, 3, 3]
    assert index.starts.tolist() == [[0, 0], [0, 4], [2, 3], [3, 2], [6, 0], [7, 0]]
    assert index.shuffle.tolist() == [2, 0, 4, 3, 1]


def test_a_sample_that_ends_with_its_document_is_followed_by_one_that_starts_there() -> None:
    sizes = np.array([5, 5], np.int32)
    index = build_sample_index(np.array([0, 1]), sizes, num_samples=2, seq_length=4, seed=0)
    # Sample 0 is all 5 tokens of the first document; sample 1 starts at the last of them.
    assert index.starts.tolist() == [[0, 0], [0, 4], [1, 3]]


def test_empty_documents_are_skipped_except_by_the_first_row() -> None:
    sizes = np.array([0, 3], np.int32)
    for seed in range(8):
        index = build_sample_index(np.array([0, 1]), sizes, num_samples=1, seq_length=1, seed=seed)
        assert index.starts[0].tolist() == [0, 0]
        assert all(sizes[index.documents[row]] for row in index.starts[1:, 0])


def test_epochs_are_the_fewest_that_suffice() -> None:
    assert num_epochs(101, num_samples=10, seq_length=10) == 1
    assert num_epochs(100, num_samples=10, seq_length=10) == 2
    assert num_epochs(1000, num_samples=0, seq_length=10) == 1
    assert num_epochs(3, num_samples=10**12, seq_length=2048) == (10**12 * 2048 + 1 + 2) // 3


def test_documents_without_a_token_are_refused() -> None:
    with refused(DataError, code="no-tokens"):
        build_sample_index(np.array([0]), np.array([0], np.int32), num_samples=1, seq_length=4, seed=0)


def test_wider_types_are_used_only_where_needed() -> None:
    assert sample_dtype(2**31 - 1) == np.int32
    assert sample_dtype(2**31) == np.int64
    assert shuffle_dtype(2**32 - 3) == np.uint32
    assert shuffle_dtype(2**32 - 2) == np.int64
