import pytest
import torch

from neox_kernels import bias_dropout_add
from neox_kernels.operators.bias_dropout_add import _backward, _forward
from neox_kernels.philox import KEEP_ALL, ROUNDS, draw_seed, keep_below, kept, philox

# Known answers published with the generator (Random123, philox4x32): 7 and 10 rounds.
DIGITS = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
ZEROS, ONES = ((0,) * 4, (0,) * 2), ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)
KNOWN = [
    (*ZEROS, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (*ONES, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (*DIGITS, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (*ZEROS, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (*ONES, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*DIGITS, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "rounds", "expected"), KNOWN)
def test_philox_gives_the_published_numbers(counter, key, rounds, expected):
    bits = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)), rounds)
    assert tuple(int(number) for number in bits) == expected


COUNT = 1 << 20


def numbers(seed, rounds):
    """Return the 16-bit numbers of the first elements, as the mask has them."""
    group = torch.arange(COUNT // 8)
    zero = torch.zeros_like(group)
    seed = torch.tensor(seed)
    words = philox((group, zero, zero, zero), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), rounds)
    return torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=1).flatten()


def deviation(values):
    """Return by how many standard deviations the chi-squared statistic of bytes exceeds its mean."""
    counts = torch.bincount(values, minlength=256).double()
    expected = len(values) / 256
    return ((counts - expected).square().sum().item() / expected - 255) / (2 * 255) ** 0.5


def worst_deviation(rounds):
    """Test bytes of numbers, and pairs of neighbours, of rows below each other and of neighbouring seeds."""
    found = []
    for seed in (0, 1, 2**40 + 5, -7):
        first, second = numbers(seed, rounds), numbers(seed + 1, rounds)
        found += [deviation(first >> 8), deviation(first & 0xFF)]
        found += [
            deviation(a >> 12 << 4 | b >> 12)
            for lag in (1, 2, 3, 8, 1024, 12288)
            for a, b in [(first[:-lag], first[lag:])]
        ]
        found.append(deviation(first >> 12 << 4 | second >> 12))
    return max(map(abs, found))


def test_numbers_are_uniform_and_independent():
    assert worst_deviation(ROUNDS) < 5


def test_fewer_rounds_are_found_to_be_dependent():
    assert worst_deviation(3) > 20


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_fraction_and_runs_of_kept_elements(p):
    mask = kept(torch.tensor([99]), torch.Size([COUNT]), keep_below(p)).double()
    spread = (p * (1 - p) / COUNT) ** 0.5
    assert abs(mask.mean().item() - keep_below(p) / KEEP_ALL) < 5 * spread
    centred = mask - mask.mean()
    for lag in (1, 7, 8, 4096):
        correlation = (centred[:-lag] * centred[lag:]).mean().item() / (p * (1 - p))
        assert abs(correlation) < 5 * COUNT**-0.5


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
