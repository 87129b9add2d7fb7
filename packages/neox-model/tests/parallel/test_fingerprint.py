"""Fingerprints change with every bit, and do not depend on how much is summed at once."""

import pytest
import torch

from neox_model.parallel import fingerprint as module
from neox_model.parallel.fingerprint import fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


MODULUS = 2**64
PLACE, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def expected(values: torch.Tensor) -> int:
    """The documented sum, in Python's integers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    total = 0
    for place, bits in enumerate(values.flatten().view(integers).tolist(), start=1):
        mixed = (bits + place * PLACE) * MIX % MODULUS
        mixed = (mixed ^ mixed >> 32) * PLACE % MODULUS
        total += mixed ^ mixed >> 29
    return (total + MODULUS // 2) % MODULUS - MODULUS // 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [3, 1 << 22])
def test_a_fingerprint_is_the_documented_sum(monkeypatch, dtype, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    values = (torch.randn(5, 4, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert fingerprint(values).item() == expected(values)
    assert fingerprint(values.T).item() == expected(values.T.contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_flipped_bit_changes_it(dtype):
    values = (torch.randn(7, generator=torch.Generator().manual_seed(2)) * 100).to(dtype)
    original = fingerprint(values).item()
    data = values.view(torch.uint8)
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert fingerprint(values).item() != original
            data[byte] ^= 1 << bit


def test_nothing_has_a_fingerprint():
    assert fingerprint(torch.empty(0, 3)).item() == 0


@pytest.mark.parametrize("neighbours", [2, 4, 8])
def test_the_same_bit_of_neighbours_changes_it(neighbours):
    """As a faulty data line does: changes of neighbours must not cancel."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(400, generator=generator).to(torch.bfloat16)
    original = fingerprint(values).item()
    bits = values.view(torch.int16)
    for start in range(len(bits) - neighbours):
        for bit in range(15):
            bits[start : start + neighbours] ^= 1 << bit
            assert fingerprint(values).item() != original
            bits[start : start + neighbours] ^= 1 << bit
