"""The extension is there wherever it can be: tests that compare it with numpy skip only where it cannot."""

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from neox_data.native import load_native
from support.refusals import refused

HEADER = Path(sysconfig.get_path("include"), "Python.h")


@pytest.mark.skipif(shutil.which("g++") is None or not HEADER.is_file(), reason="no compiler, or no Python.h")
def test_extension_is_compiled_if_there_is_a_compiler() -> None:
    assert load_native() is not None


native = load_native()
without = pytest.mark.skipif(native is None, reason="the extension was not built")


def misaligned(values: np.ndarray) -> np.ndarray:
    """Return the same array one byte behind an aligned address, as arrays of an `.idx` are."""
    found = np.frombuffer(b"x" + values.tobytes(), values.dtype, offset=1)
    assert not found.flags.aligned
    return found


@without
def test_functions_read_arrays_at_any_address() -> None:
    documents, sizes = np.array([2, 0, 1, 2], np.int32), np.array([4, 9, 7], np.int32)
    assert native.count_tokens(misaligned(documents), misaligned(sizes)) == 27
    starts = np.empty((6, 2), np.int32)
    native.sample_starts(misaligned(documents), misaligned(sizes), starts, 5)
    assert starts.tolist() == [[0, 0], [0, 5], [1, 3], [2, 4], [3, 0], [3, 5]]
    order, taken = np.empty(8, np.uint8), np.empty((2, 2), np.int64)
    native.blend_order(misaligned(np.array([0.75, 0.25])), order, taken, 8, 400)
    assert order.tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert taken.tolist() == [[0, 0], [6, 2]]


@without
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_samples_are_read_from_arrays_at_any_address(dtype: str) -> None:
    tokens = np.arange(100, 120).astype(dtype)
    if dtype not in ("uint8", "int8"):
        tokens = misaligned(tokens)
    arrays = (
        np.array([0, 12]),
        np.array([12, 8], "i4"),
        np.array([1, 0], "i4"),
        np.array([[0, 0], [0, 5], [1, 2]]),
    )
    places, sizes, documents, starts = map(misaligned, arrays)
    signed, shuffle = dtype[0] == "i", misaligned(np.array([1, 0], np.uint32))
    reader = native.SampleReader(
        tokens, signed, places, tokens.itemsize, sizes, documents, starts, shuffle, 6
    )
    assert reader.read(0).tolist() == [117, 118, 119, 100, 101, 102]
    assert reader.read(1).tolist() == [112, 113, 114, 115, 116, 117]


@without
@pytest.mark.parametrize("number", [-1, 3, 2**31 - 1, -(2**31)])
def test_documents_that_do_not_exist_are_refused(number: int) -> None:
    documents, sizes = np.array([0, number], np.int32), np.array([4, 9, 7], np.int32)
    with refused(IndexError, f"document {number}", "3"):
        native.count_tokens(documents, sizes)
    with refused(IndexError, f"document {number}", "3"):
        native.sample_starts(documents, sizes, np.empty((9, 2), np.int32), 5)


FEW = np.array([0, 1], np.int32)


@without
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: native.sample_starts(FEW, FEW, np.empty((0, 2), np.int32), 5), 'rows of two'),
        (lambda: native.sample_starts(FEW, FEW, np.empty(3, np.int32), 5), 'rows of two'),
        (lambda: native.sample_starts(FEW, FEW, np.empty((2, 2), np.int32), 0), 'seq_length must be'),
        (lambda: native.sample_starts(FEW, FEW, np.empty((2, 2), np.int32), 5), 'fewer tokens'),
        (lambda: native.count_tokens(FEW.astype(np.int64), FEW), 'documents has another'),
        (lambda: native.count_tokens(np.zeros(6, np.int32)[::2], FEW), 'is not contiguous'),
        (lambda: blend([np.nan, 0.5]), 'weights must be'),
        (lambda: blend([0.5] * 300), 'order cannot hold'),
        (lambda: native.MersenneTwister(1).shuffle(np.zeros(3, np.int16)), 'another item size'),
        (lambda: native.MersenneTwister(1).shuffle(misaligned_output()), 'is not aligned'),
        (lambda: reader(place_bytes=0), 'place_bytes must divide'),
        (lambda: reader(place_bytes=4), 'place_bytes must divide'),
        (lambda: reader(tokens=np.zeros(4, np.complex128)), 'unsupported type'),
        (lambda: reader(tokens=np.zeros(4, np.uint32)), 'unsupported type'),
        (lambda: reader(length=0), 'at least 1'),
    ],
)  # fmt: skip
def test_impossible_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with refused(ValueError, message):
        call()


def blend(weights: list[float]) -> None:
    shares = np.array(weights)
    native.blend_order(shares, np.empty(8, np.uint8), np.empty((2, len(shares)), np.int64), 8, 400)


def misaligned_output() -> np.ndarray:
    return np.frombuffer(bytearray(13), np.int32, count=3, offset=1)


def reader(**changes: object) -> None:
    few = np.zeros(2, np.int32)
    arguments = {
        "tokens": np.zeros(4, np.uint16), "is_signed": False, "places": few, "place_bytes": 1, "sizes": few,
        "documents": few, "starts": few, "shuffle": np.zeros(1, np.uint32), "length": 2,
    }  # fmt: skip
    native.SampleReader(**(arguments | changes))


@without
def test_samples_of_random_damage_are_read_or_refused() -> None:
    """Extreme values in every array: nothing outside the arrays is read, and nothing overflows."""
    random = np.random.default_rng(0)
    extremes = [0, 1, -1, 2, 5, 19, 20, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)]
    read = 0
    for _ in range(3000):
        arrays = {
            "places": np.array([0, 24, 40]), "sizes": np.array([12, 8, 0]),
            "documents": np.array([1, 2, 0, 1]), "starts": np.array([[0, 0], [0, 5], [2, 2], [3, 1]]),
            "shuffle": np.array([2, 1, 0]),
        }  # fmt: skip
        for _ in range(random.integers(0, 3)):
            damaged = arrays[random.choice(list(arrays))].reshape(-1)
            damaged[random.integers(len(damaged))] = random.choice(extremes)
        tokens = np.arange(20, dtype=np.uint16)
        made = native.SampleReader(tokens, False, place_bytes=1, length=int(random.integers(1, 8)), **arrays)
        for item in (-1, 0, 1, 2, 3, 2**63 - 1):
            found = made.read(item)
            read += found is not None
            assert found is None or found.max() < 20
    assert read > 300
