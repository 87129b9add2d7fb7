"""Fingerprints of tensors, computed on their device."""

import torch
from torch import Tensor

__all__ = ["fingerprint"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
"""Elements that are converted to 64-bit integers at once: 32 MiB."""


def fingerprint(values: Tensor) -> Tensor:
    """Return a 64-bit number, an int64 tensor of shape (), that depends on every bit of a tensor.

    The sum of (2 i + 1) times the bits of element i as an integer, modulo 2^64. The factors are odd, so a
    change of a single element always changes the sum; other changes are missed with a probability of about
    2^-64.

    Args:
        values: a tensor of any shape and dtype of 1, 2, 4 or 8 bytes.
    """
    bits = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        first, last = 2 * start + 1, 2 * (start + chunk.numel()) + 1
        total += (chunk * torch.arange(first, last, 2, device=bits.device)).sum()
    return total
