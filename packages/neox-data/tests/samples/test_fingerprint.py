import hashlib

import numpy as np
import pytest

from neox_data.samples.fingerprint import fingerprint

RANDOM = np.random.default_rng(0)
BLOCK = 1 << 14


def by_formula(arrays) -> str:
    """Compute the sums with Python's integers, which have no limit."""
    drawn = hashlib.shake_256(b"neox-data fingerprint").digest(8 * BLOCK)
    factors = [int.from_bytes(drawn[place : place + 8], "little") | 1 for place in range(0, len(drawn), 8)]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        for begin in range(0, len(array), BLOCK):
            pairs = zip(array[begin : begin + BLOCK].tolist(), factors, strict=False)
            digest.update((sum(x * k for x, k in pairs) % 2**64).to_bytes(8, "little"))
    return digest.hexdigest()[:32]


@pytest.mark.parametrize("length", [0, 1, BLOCK, BLOCK + 1, 40_000])
def test_it_is_that_of_the_formula(length: int) -> None:
    small = RANDOM.integers(-(2**31), 2**31, length).astype(np.int32)
    large = RANDOM.integers(0, 2**62, length)
    assert fingerprint([small, large]) == by_formula([small, large])


@pytest.mark.parametrize("bit", [0, 1, 15, 30])
@pytest.mark.parametrize("place", [0, 1, 9_999, 30_000, 39_999])
def test_any_changed_bit_changes_it(place: int, bit: int) -> None:
    numbers = RANDOM.integers(0, 2**31, 40_000).astype(np.int32)
    before = fingerprint([numbers])
    numbers[place] ^= 1 << bit
    assert fingerprint([numbers]) != before


def test_order_and_division_into_arrays_matter_and_types_do_not() -> None:
    numbers = np.array([3, -100, 7, 7], np.int64)
    found = {
        fingerprint(arrays)
        for arrays in (
            [numbers],
            [numbers[::-1]],
            [numbers[[1, 0, 2, 3]]],
            [numbers[:3]],
            [numbers[:2], numbers[2:]],
            [numbers, numbers[:0]],
            [np.append(numbers, 0)],
        )
    }
    assert len(found) == 7
    assert {fingerprint([numbers.astype(kind)]) for kind in (np.int8, np.int16, np.int32)} <= found
