"""Random bits for dropout, computed from the seed and the element's index: Philox4x32-7.

    bits(8 g ... 8 g + 7) = philox(key = seed, counter = g)      one counter gives eight 16-bit numbers
    element e is kept if bits(e) < (1 - p) 2^16

Elements 2 i and 2 i + 1 of a group have the lower and the upper half of the counter's 32-bit number i.
Backward recomputes the mask of forward instead of storing it. The mask does not depend on the launch
configuration, and is the same on the CPU. Seven rounds are the fewest that pass the batteries of tests in the
source; ten, its general recommendation, would cost a tenth more instructions in a backward pass.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor

__all__ = ["KEEP_ALL", "draw_seed", "keep_below", "kept", "philox"]

KEEP_ALL = 2**16
ROUNDS = 7
LOW = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = 10) -> tuple[Tensor, ...]:
    """Return four 32-bit numbers for each counter.

    Args:
        counter: four int64 tensors of the same shape, with values below 2^32.
        key: two int64 tensors with values below 2^32, broadcastable to the counter.
        rounds: number of rounds.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The signed 64-bit product wraps around; both 32-bit halves are correct.
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
    """Return the bound for 16 random bits below which an element is kept, for dropout probability `p`."""
    return round((1 - p) * KEEP_ALL)


def kept(seed: Tensor, shape: torch.Size, bound: int) -> Tensor:
    """Return a boolean tensor of the given shape: True for elements that dropout keeps.

    Args:
        seed: tensor with one int64.
        shape: shape of the tensor that dropout is applied to; elements are numbered in row-major order.
        bound: result of `keep_below`.
    """
    count = shape.numel()
    group = torch.arange((count + 7) // 8, device=seed.device)
    zero = torch.zeros_like(group)
    words = philox((group & LOW, group >> 32, zero, zero), (seed & LOW, seed >> 32 & LOW), ROUNDS)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return (torch.stack(halves, dim=1).flatten()[:count] < bound).reshape(shape)


def draw_seed(device: torch.device) -> Tensor:
    """Draw one int64 from the device's PyTorch generator; a CUDA graph draws a new one at each replay."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
