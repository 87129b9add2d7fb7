"""Adam with decoupled weight decay (AdamW), as torch's one-kernel implementation.

DeepSpeed's own Adam kernels are compiled when a training first starts; torch's need no compiler.
"""

from typing import Any

import torch

__all__ = ["adam"]


def adam(parameters: list[dict[str, Any]], **settings: Any) -> torch.optim.AdamW:
    """AdamW over these groups, with torch's fused update.

    Args:
        parameters: parameter groups.
        settings: `lr`, `betas`, `eps` and whatever else `torch.optim.AdamW` takes.

    Source: arXiv:1711.05101.
    """
    return torch.optim.AdamW(parameters, fused=True, **settings)
