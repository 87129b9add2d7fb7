"""In which type the plain twins calculate: 16-bit inputs in float32, wider ones as they are.

The fused operators keep every intermediate value in float32, so the twins do the same; float64 stays float64,
which is what makes gradient checks possible.
"""

import torch
from torch import Tensor

__all__ = ["FUSED_DTYPES", "widen"]

FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def widen(tensor: Tensor) -> Tensor:
    """The tensor in the type it is calculated in: float32 for 16-bit types, else unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
