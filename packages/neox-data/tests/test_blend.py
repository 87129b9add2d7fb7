import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neox_data import blend as blend_module
from neox_data.blend import BlendedDataset, BlendOrder, blend_order, build_blend, plain_blend_order
from neox_data.errors import DataError
from neox_data.native import load_native
from neox_data.weights import normalise_weights, samples_per_dataset
from support.refusals import refused


class Numbers:
    """Item k of dataset `first` is the array [first + k]."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> np.ndarray:
        return np.array([self.first + item])


def slow_order(weights: list[float], num_items: int) -> list[tuple[int, int]]:
    """Return the documented order, computed one sample at a time."""
    taken = [0] * len(weights)
    order = []
    for k in range(num_items):
        deficits = [weight * max(k, 1) - count for weight, count in zip(weights, taken, strict=True)]
        j = deficits.index(max(deficits))
        order.append((j, taken[j]))
        taken[j] += 1
    return order


def pairs(order: BlendOrder) -> list[tuple[int, int]]:
    return [order.locate(item) for item in range(len(order.datasets))]


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=12), st.integers(0, 200))
def test_the_order_is_the_documented_one(weights: list[float], num_items: int) -> None:
    shares = normalise_weights(weights, len(weights))
    for order in (plain_blend_order(shares, num_items), blend_order(shares, num_items)):
        assert pairs(order) == slow_order(shares.tolist(), num_items)


# Percentages of the 22 parts of the Pile, as published (arXiv:2101.00027, table 1).
PILE = [18.11, 14.40, 12.07, 10.01, 8.96, 7.59, 6.12, 5.13, 3.65, 3.07, 2.17, 1.55, 1.53, 1.24, 0.88, 0.75]
PILE += [0.73, 0.62, 0.60, 0.38, 0.30, 0.14]
CLOSE = [0.131, 0.295, 0.129, 0.251, 0.005, 0.216, 0.12, 0.15]


@pytest.mark.parametrize(
    ("weights", "sha256"),
    [
        (PILE, "26101ec6bfa3d81cbdb09bcc128573b2446a9ba69f826dd069c92e2bc3d3ab3a"),
        (CLOSE, "39c18eeffb87eb9e72f9d1dd4732baa5221a065126ecfaddd8e3525d2e9bb70d"),
    ],
)
def test_decimal_weights_are_mixed_as_by_gpt_neox(weights: list[float], sha256: str) -> None:
    """The hashes are of `dataset_index` of GPT-NeoX's own code at commit ea7aefd, run with these weights."""
    num_items = 200_000
    total = 0.0
    for weight in weights:
        total += weight
    divided = np.array([weight / total for weight in weights])
    expected = [j for j, _ in slow_order((divided / np.sum(divided)).tolist(), num_items)]
    blend = BlendedDataset([Numbers(0, num_items) for _ in weights], weights, num_items)
    found = blend._order.datasets[:num_items]
    assert found.tolist() == expected
    assert hashlib.sha256(found.tobytes()).hexdigest() == sha256


def test_each_dataset_is_built_for_its_share_by_the_plain_sum() -> None:
    weights, counts = [0.1, 0.7, 0.2, 0.3, 0.4, 0.6, 0.9, 0.8], []

    def build(number: int, count: int) -> Numbers:
        counts.append(count)
        return Numbers(0, count)

    build_blend(build, weights, 200_000)
    total = 0.1 + 0.7 + 0.2 + 0.3 + 0.4 + 0.6 + 0.9 + 0.8
    assert counts == [math.ceil(200_000 * (weight / total) * 1.005) for weight in weights]


def test_equals_are_decided_for_the_first() -> None:
    for order in (plain_blend_order(np.array([0.25] * 4), 8), blend_order(np.array([0.25] * 4), 8)):
        assert order.datasets.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
        assert [item for _, item in pairs(order)] == [0, 0, 0, 0, 1, 1, 1, 1]


# Weights that are equal, close within a rounding, dyadic (so that deficits tie exactly), zero, or far apart.
any_weight = st.one_of(
    st.floats(0, 1),
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 1 / 3, 0.1, 0.1 + 2**-55, 0.3, 0.1 + 0.2, 1e-9]),
    st.integers(1, 6).map(float),
)


@pytest.mark.skipif(load_native() is None, reason="the extension was not built")
@pytest.mark.parametrize(
    ("most_scanned", "most_lanes"),
    [(0, 0), (1000, 1), (1000, 4), (1000, 8)],
    ids=["tournament", "plain scan", "scan by 4", "scan by 8"],
)
@given(st.lists(any_weight, min_size=1, max_size=70).filter(any), st.integers(0, 400))
def test_native_orders_equal_the_plain_one(
    most_scanned: int, most_lanes: int, weights: list[float], num_items: int
) -> None:
    shares = normalise_weights(weights, len(weights))
    plain, order = plain_blend_order(shares, num_items), BlendOrder.empty(num_items, len(weights))
    load_native().blend_order(
        shares, order.datasets, order.taken_before, order.block, most_scanned, most_lanes
    )
    np.testing.assert_array_equal(order.datasets, plain.datasets)
    np.testing.assert_array_equal(order.taken_before, plain.taken_before)


@pytest.mark.skipif(load_native() is None, reason="the extension was not built")
def test_native_orders_stay_equal_over_many_blocks_and_datasets() -> None:
    weights = normalise_weights(np.random.default_rng(0).random(300).tolist(), 300)
    orders = [BlendOrder.empty(20_000, 300) for _ in range(2)]
    for order, most_scanned in zip(orders, (0, 1000), strict=True):
        load_native().blend_order(weights, order.datasets, order.taken_before, order.block, most_scanned)
    plain = plain_blend_order(weights, 20_000)
    for order in orders:
        np.testing.assert_array_equal(order.datasets, plain.datasets)
        np.testing.assert_array_equal(order.taken_before, plain.taken_before)


# Stretches of the order are found side by side from guessed beginnings; those that began wrongly are found
# anew. So: small weights and many datasets, which take long to fall into step, exact ties, and odd lengths.
LONG_WEIGHTS = {
    "random": np.random.default_rng(1).random(64),
    "few": np.array([0.3, 0.2, 0.5]),
    "cubes": np.random.default_rng(2).exponential(1, 100) ** 3,
    "tiny": np.array([1, 1e-4, 1e-5, 3e-5, 1e-9, 0]),
    "halves": 2.0 ** -np.arange(14),
    "equal": np.ones(33),
    "many": np.random.default_rng(3).random(390),
}


@pytest.mark.skipif(load_native() is None, reason="the extension was not built")
@pytest.mark.parametrize("most_lanes", [1, 4, 8])
@pytest.mark.parametrize("name", LONG_WEIGHTS)
def test_parallel_segments_equal_a_sequential_scan(name: str, most_lanes: int) -> None:
    weights = LONG_WEIGHTS[name] / LONG_WEIGHTS[name].sum()
    for num_items in (8 * 4096, 8 * 4096 + 1, 150_001):
        orders = [BlendOrder.empty(num_items, len(weights)) for _ in range(2)]
        for order, most_scanned in zip(orders, (0, 1000), strict=True):
            load_native().blend_order(
                weights, order.datasets, order.taken_before, order.block, most_scanned, most_lanes
            )
        np.testing.assert_array_equal(orders[0].datasets, orders[1].datasets)
        np.testing.assert_array_equal(orders[0].taken_before, orders[1].taken_before)


@pytest.mark.parametrize("num_items", [0, 1, 4095, 4096, 8192, 9000])
def test_counts_match_the_items(num_items: int) -> None:
    order = blend_order(np.array([0.2, 0.5, 0.3]), 8192)
    expected = np.bincount(order.datasets[:num_items], minlength=3)
    assert order.taken(num_items).tolist() == expected.tolist()


def test_places_continue_from_block_to_block() -> None:
    order = blend_order(np.array([0.7, 0.3]), 9000)
    for dataset in (0, 1):
        items = np.flatnonzero(order.datasets == dataset)
        assert [order.locate(int(k))[1] for k in items[::97]] == list(range(0, len(items), 97))


def test_places_lead_back_to_their_items() -> None:
    blend = BlendedDataset([Numbers(0, 9001), Numbers(10_000, 0), Numbers(20_000, 3100)], [3, 0, 1], 12_000)
    for item in (0, 1, 2, 4095, 4096, 4097, 11_999):
        assert blend.items_of(*blend.locate(item)) == [item]
    assert blend.items_of(1, 0) == blend.items_of(2, 3100) == []


def test_any_number_of_datasets() -> None:
    order = blend_order(np.full(70_000, 1 / 70_000), 70_001)
    assert order.datasets.dtype == np.uint32
    assert (order.locate(69_999), order.locate(70_000)) == ((69_999, 0), (0, 1))


def test_numpy_order_is_used_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.array([0.6, 0.4])
    expected = pairs(blend_order(weights, 20))
    monkeypatch.setattr(blend_module, "load_native", lambda: None)
    assert pairs(blend_order(weights, 20)) == expected


def test_a_dataset_that_the_order_takes_more_of_is_built_longer() -> None:
    asked = []

    def build(number: int, count: int) -> Numbers:
        asked.append((number, count))
        return Numbers(100 * number, count)

    # The first of equal datasets is dataset 0, even with weight 0 and no samples.
    blend = build_blend(build, [0, 1], 3)
    assert asked == [(0, 0), (0, 1), (1, 4)]
    assert [blend[k].item() for k in range(3)] == [100, 0, 101]


def test_items_come_from_their_datasets() -> None:
    blend = BlendedDataset([Numbers(100, 4), Numbers(200, 8)], [1, 2], 10)
    assert len(blend) == 12
    assert [blend[k].item() for k in range(10)] == [200, 100, 201, 101, 202, 203, 102, 204, 205, 103]
    assert blend.locate(4) == (1, 2)


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.integers(1, 300))
def test_items_of_a_blend_are_within_their_datasets(weights: list[float], num_samples: int) -> None:
    counts = samples_per_dataset(num_samples, normalise_weights(weights, len(weights)))
    blend = BlendedDataset([Numbers(0, count) for count in counts], weights, num_samples)
    assert len(blend) >= num_samples
    assert blend[num_samples - 1].size == 1


def test_a_dataset_that_is_too_short_is_refused() -> None:
    with refused(DataError, "dataset 1", "2 samples", "9 items"):
        BlendedDataset([Numbers(0, 9), Numbers(0, 2)], [1, 1.1], 9)


@pytest.mark.parametrize("item", [-1, 12])
def test_an_item_that_is_not_there_is_refused(item: int) -> None:
    with refused(IndexError, f"item {item}", "12"):
        BlendedDataset([Numbers(100, 4), Numbers(200, 8)], [1, 2], 10)[item]
