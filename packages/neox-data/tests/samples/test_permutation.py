from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neox_data.samples.permutation import KeyedPermutation
from support.refusals import refused


@given(st.integers(1, 400), st.text(max_size=8))
def test_every_number_comes_once(length: int, key: str) -> None:
    permutation = KeyedPermutation(length, key)
    assert sorted(permutation[i] for i in range(length)) == list(range(length))


@given(st.integers(1, 10**15), st.text(max_size=8), st.data())
def test_the_inverse_leads_back(length: int, key: str, data) -> None:
    permutation, item = KeyedPermutation(length, key), data.draw(st.integers(0, length - 1))
    assert permutation.index(permutation[item]) == item


def test_a_fixed_example_never_changes() -> None:
    assert [KeyedPermutation(10, "1234 train 0")[i] for i in range(10)] == [4, 0, 7, 3, 2, 6, 1, 8, 5, 9]


def test_a_length_beyond_any_corpus_costs_no_more() -> None:
    permutation = KeyedPermutation(10**17, "key")
    places = {permutation[i] for i in range(2000)}
    assert len(places) == 2000
    assert max(places) < 10**17


@pytest.mark.parametrize("item", [-1, 5])
def test_items_out_of_range_are_refused(item: int) -> None:
    with refused(IndexError, f"item {item}", "5"):
        KeyedPermutation(5, "key")[item]
    with refused(IndexError, f"place {item}", "5"):
        KeyedPermutation(5, "key").index(item)


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the counts are from equal ones."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_every_order_of_a_few_is_equally_likely() -> None:
    seen = Counter(tuple(KeyedPermutation(4, str(key))[i] for i in range(4)) for key in range(4800))
    counts = np.array([seen[order] for order in permutations(range(4))])
    assert abs(chi_square(counts)) < 4


def test_every_item_is_equally_likely_at_every_place() -> None:
    counts = np.zeros((11, 11))
    for key in range(1500):
        permutation = KeyedPermutation(11, str(key))
        for item in range(11):
            counts[item, permutation[item]] += 1
    assert abs(chi_square(counts)) < 4


def test_the_first_items_come_from_everywhere_and_follow_no_line() -> None:
    length = 1_000_003
    permutation = KeyedPermutation(length, "1234 train 0")
    places = np.array([permutation[i] for i in range(20_000)])
    assert abs(chi_square(np.bincount(places * 100 // length, minlength=100))) < 4
    steps = (places[1:] - places[:-1]) % length
    assert abs(chi_square(np.bincount(steps * 100 // length, minlength=100))) < 4
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 4 / np.sqrt(len(places))
    assert abs(np.corrcoef(places, np.arange(20_000))[0, 1]) < 4 / np.sqrt(len(places))
