"""The random bits of dropout, made from a seed and an element's number alone: Philox4x32-10.

    bits(4 g ... 4 g + 3) = philox(key = seed, counter = g)        one counter makes four numbers of 32 bits
    element e is kept where bits(e) < (1 - p) 2^32

So backward makes the forward's mask again without storing it, whatever the launch, and the CPU makes the
same.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor

__all__ = ["KEEP_ALL", "draw_seed", "keep_below", "kept", "philox"]

KEEP_ALL = 2**32
LOW = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = 10) -> tuple[Tensor, ...]:
    """Four numbers of 32 bits for each counter.

    Args:
        counter: four int64 tensors with values below 2^32, of one shape.
        key: two int64 tensors with values below 2^32, that broadcast to the counter's.
        rounds: how often the bits are mixed.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The product wraps around in 64 bits, signed as it is; its 32-bit halves are right.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32 & LOW) ^ c1 ^ k0,
            product1 & LOW,
            (product0 >> 32 & LOW) ^ c3 ^ k1,
            product0 & LOW,
        )
        k0, k1 = k0 + KEY_STEPS[0] & LOW, k1 + KEY_STEPS[1] & LOW
    return c0, c1, c2, c3


def keep_below(p: float) -> int:
    """The bound under which 32 random bits keep an element that is dropped with probability `p`."""
    return round((1 - p) * KEEP_ALL)


def kept(seed: Tensor, shape: torch.Size, bound: int) -> Tensor:
    """Which elements of a tensor are kept: boolean, of the given shape.

    Args:
        seed: one int64.
        shape: of the tensor that dropout is applied to, numbered in row-major order.
        bound: what `keep_below` gives.
    """
    count = shape.numel()
    group = torch.arange((count + 3) // 4, device=seed.device)
    zero = torch.zeros_like(group)
    bits = philox((group & LOW, group >> 32, zero, zero), (seed & LOW, seed >> 32 & LOW))
    return (torch.stack(bits, dim=1).flatten()[:count] < bound).reshape(shape)


def draw_seed(device: torch.device) -> Tensor:
    """One int64 on the device, from PyTorch's generator there; a captured graph draws anew at each replay."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
