"""The dtype in which reference implementations compute: float32 for 16-bit inputs, otherwise the input's.

The fused operators keep intermediate values in float32, and the reference implementations do the same.
float64 stays float64, for gradient checks.
"""

import torch
from torch import Tensor

__all__ = ["FUSED_DTYPES", "widen"]

FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def widen(tensor: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32; return others unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
