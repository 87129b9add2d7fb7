"""Fingerprints of tensors, computed on their device."""

import torch
from torch import Tensor

__all__ = ["fingerprint"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are hashed at once; needs about 24 bytes for each.
_CHUNK = 1 << 20
# The odd constants of splitmix64, as signed numbers.
_PLACE, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def fingerprint(values: Tensor) -> Tensor:
    """Return a 64-bit number, an int64 tensor of shape (), that depends on every bit of a tensor.

    The sum of a hash of every element and its place, modulo 2^64. For each place the hash is a bijection, so
    a change of a single element always changes the sum.

    Args:
        values: a tensor of any shape and dtype of 1, 2, 4 or 8 bytes.
    """
    bits = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        total += _hashes(bits[start : start + _CHUNK].to(torch.int64), start).sum()
    return total


def _hashes(elements: Tensor, first: int) -> Tensor:
    """Return a hash of each element and its place; `first` is the place of the first one."""
    places = torch.arange(first + 1, first + 1 + elements.numel(), device=elements.device)
    mixed = (elements + places * _PLACE) * _MIX
    # Shifts of signed numbers copy the sign; the masks remove the copies.
    mixed = (mixed ^ ((mixed >> 32) & ((1 << 32) - 1))) * _PLACE
    return mixed ^ ((mixed >> 29) & ((1 << 35) - 1))
