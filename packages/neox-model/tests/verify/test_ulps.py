import math

import pytest
import torch

from neox_model.verify import ulps
from neox_model.verify.ulps import Distance


def distance(one, other):
    found = Distance()
    found.add(one, other)
    return found


def test_ulps_count_the_float16_numbers_from_one_to_the_other():
    """All finite numbers in order, the two zeros at the same place."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = numbers[numbers.isfinite()]
    places = {value: place for place, value in enumerate(sorted({float(each) for each in finite}))}
    chosen = finite[torch.randperm(finite.numel(), generator=torch.Generator().manual_seed(1))][:2000]
    for one, other in zip(chosen[:1000], chosen[1000:], strict=True):
        expected = abs(places[float(one)] - places[float(other)])
        assert distance(one.view(1), other.view(1)).ulps == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_neighbours_are_one_ulp_apart(dtype):
    values = torch.tensor([-3.0, -1.0, -1e-30, 0.0, 1.0, 2.0], dtype=dtype)
    above = torch.nextafter(values, torch.full_like(values, math.inf))
    found = distance(values, above)
    assert (found.numel, found.differing, found.ulps) == (6, 6, 1.0)
    assert distance(values, values.clone()).differing == 0


def test_the_farthest_float64_numbers_do_not_overflow():
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    found = distance(largest, -largest)
    assert found.ulps == pytest.approx(2.0 * (2047 * 2**52 - 1))


def test_zeros_of_other_sign_differ_by_no_ulp():
    found = distance(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.differing, found.ulps, found.relative_norm) == (1, 0.0, 0.0)


def test_another_dtype_is_measured_in_the_coarser_one():
    values = torch.tensor([1.0, 1.5, 1.0078125])
    assert distance(values, values.bfloat16()).differing == 0
    found = distance(torch.tensor([1.0, 2.001]), torch.tensor([1.0078125, 2.0], dtype=torch.bfloat16))
    assert (found.differing, found.ulps) == (2, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_infinitely_far(value):
    found = distance(torch.tensor([1.0, value]), torch.tensor([1.0, 2.0]))
    assert (found.differing, found.ulps, found.relative_norm) == (1, math.inf, math.inf)


def test_the_norm_is_relative_to_the_larger_of_both_and_does_not_depend_on_slices(monkeypatch):
    one, other = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 0.0, 0.0])
    assert distance(one, other).relative_norm == distance(other, one).relative_norm == 4 / 5
    zeros = torch.zeros(3)
    assert distance(zeros, one).relative_norm == 1.0
    monkeypatch.setattr(ulps, "_SLICE", 2)
    assert distance(one, other).relative_norm == 4 / 5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_in_both_leave_the_norm_of_the_others(value):
    found = distance(torch.tensor([3.0, 4.0, value]), torch.tensor([3.0, 0.0, value]))
    assert (found.differing, found.relative_norm) == (1, 4 / 5)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_norms_of_very_large_and_small_numbers(scale):
    one = scale * torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    other = scale * torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)
    assert distance(one, other).relative_norm == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([3]), torch.tensor([math.nan]), math.inf),
        (torch.tensor([1e30]), torch.tensor([65504.0], dtype=torch.float16), math.inf),
        (torch.tensor([2**62]), torch.tensor([2**62 + 1]), 1.0),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), 2.0**64),
        (torch.tensor([7], dtype=torch.uint8), torch.tensor([4]), 3.0),
        (torch.tensor([7]), torch.tensor([4.5]), 2.5),
    ],
)
def test_distances_between_dtypes_and_of_large_integers(one, other, expected):
    assert distance(one, other).ulps == expected
