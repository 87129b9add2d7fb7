import math

import pytest
import torch

from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.stored_types import STORED_TYPES


def test_the_tables_have_the_same_types():
    assert STORED_TYPES.keys() == DTYPES.keys()


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "BOOL"])
def test_sizes_and_limits_are_those_of_torch(name):
    dtype, stored = DTYPES[name], STORED_TYPES[name]
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    assert (stored.itemsize, stored.smallest, stored.largest) == (dtype.itemsize, limits.min, limits.max)
    assert stored.is_floating_point == dtype.is_floating_point
    for value in (limits.min, limits.max):
        assert stored.holds(value)
        assert torch.tensor(value, dtype=dtype).item() == value
    for value in (math.nan, math.inf, -math.inf):
        assert stored.holds(value) == dtype.is_floating_point


@pytest.mark.parametrize(("name", "value"), [("F16", 70_000), ("BF16", 1e39), ("F32", -1e39)])
def test_numbers_that_become_infinite_are_not_held(name, value):
    assert not STORED_TYPES[name].holds(value)
    assert torch.tensor(value, dtype=DTYPES[name]).isinf()


@pytest.mark.parametrize(("name", "value"), [("I8", 128), ("I32", 2**31), ("U8", 256)])
def test_numbers_that_overflow_are_not_held(name, value):
    assert not STORED_TYPES[name].holds(value)
    with pytest.raises((RuntimeError, OverflowError)):
        torch.tensor(value, dtype=DTYPES[name])
