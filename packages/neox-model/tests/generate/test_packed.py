"""The packed weight against the plain product, and a batch after a change of the weights."""

import pytest
import torch
from torch.nn import functional

from neox_model.generate.packed import PackedWeight, can_pack


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (1003, 64), (257, 129)])
@pytest.mark.parametrize("rows", [2, 3, 16, 64])
def test_the_product_with_a_packed_weight_is_the_plain_product(shape, rows):
    torch.manual_seed(rows)
    weight, inputs = torch.randn(shape), torch.randn(rows, shape[1])
    assert can_pack(weight, rows=rows)
    product = PackedWeight(weight, rows=rows).product(inputs)
    torch.testing.assert_close(product, functional.linear(inputs, weight))
    # Another number of rows than the usual one.
    torch.testing.assert_close(PackedWeight(weight, rows=2).product(inputs), product)


@pytest.mark.parametrize("rows", [1, 65])
def test_a_weight_is_not_packed_for_one_row_and_for_many(rows):
    assert not can_pack(torch.randn(3, 3), rows=rows)
    assert not PackedWeight(torch.randn(3, 3), rows=2).suits(rows)


def test_only_float32_is_packed():
    assert not can_pack(torch.randn(3, 3).bfloat16(), rows=2)
    assert not can_pack(torch.randn(3, 3).double(), rows=2)
