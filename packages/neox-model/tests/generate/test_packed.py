"""The packed weight against the plain product, and when it is used."""

import pytest
import torch
from torch.nn import functional

from neox_data.tokenizers import build_tokenizer
from neox_model.generate.packed import PackedWeight, can_pack
from neox_model.generate.run import build_forward_pass
from neox_model.parallel.groups import SINGLE_PROCESS
from support.settings import resolved_from

AMP = {"enabled": True, "dtype": "bf16"}


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


def test_only_float32_is_packed():
    assert not can_pack(torch.randn(3, 3).bfloat16(), rows=2)
    assert not can_pack(torch.randn(3, 3).double(), rows=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_pack(torch.randn(3, 3), rows=2)


@pytest.mark.parametrize(("settings", "dtype"), [({}, torch.float32), ({"amp": AMP}, torch.bfloat16)])
def test_the_newest_tokens_of_a_batch_have_logits_of_the_dtype_of_the_products(settings, dtype):
    resolved, tokenizer = resolved_from(settings), build_tokenizer("CharLevelTokenizer")
    forward = build_forward_pass(resolved.model, resolved.run, SINGLE_PROCESS, tokenizer)
    forward.allocate(slots=2, capacity=4)
    logits, _ = forward.logits(torch.randn(2, resolved.config.model.hidden_size))
    assert logits.dtype == dtype
