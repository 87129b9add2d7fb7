import pytest
import torch

from neox_kernels import bias_dropout_add
from neox_kernels.operators.bias_dropout_add import _backward, _forward
from neox_kernels.philox import KEEP_ALL, draw_seed, keep_below, kept, philox

# Known answers published with the generator (Random123, philox4x32-10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_numbers(counter, key, expected):
    bits = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(number) for number in bits) == expected


def test_mask_depends_only_on_the_index_of_an_element():
    seed = torch.tensor([-5])
    long = kept(seed, torch.Size([1000]), keep_below(0.3))
    assert torch.equal(kept(seed, torch.Size([10, 50]), keep_below(0.3)).flatten(), long[:500])


def test_keep_below_for_each_probability():
    assert keep_below(0.0) == KEEP_ALL
    assert keep_below(1.0) == 0
    assert keep_below(0.5) == KEEP_ALL // 2


def test_seed_depends_on_the_generator():
    torch.manual_seed(3)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert first == draw_seed(torch.device("cpu"))
    assert first != second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7), (5, 64), (2, 3, 127), (300, 8), (1, 1)])
@pytest.mark.parametrize("seed", [0, 123456789012345, -1])
def test_cuda_code_makes_the_same_mask_forward_and_backward(shape, dtype, seed, emulated):
    seed_tensor, p = torch.tensor([seed]), 0.4
    mask = kept(seed_tensor, torch.Size(shape), keep_below(p))
    x, above = torch.full(shape, 3.0, dtype=dtype), torch.ones(shape, dtype=dtype)
    result = _forward(x, None, torch.zeros(shape, dtype=dtype), seed_tensor, p)
    gradient, _ = _backward(above, None, seed_tensor, p)
    assert torch.equal(result != 0, mask)
    assert torch.equal(gradient != 0, mask)


def test_each_call_drops_different_elements(emulated):
    x, residual = torch.ones(64, 64), torch.zeros(64, 64)
    first, second = (bias_dropout_add.fused(x, None, residual, 0.5) for _ in range(2))
    assert not torch.equal(first, second)
