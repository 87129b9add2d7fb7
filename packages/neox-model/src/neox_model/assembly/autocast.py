"""Compute matrix products in 16 bits with torch.autocast, while weights and gradients stay in float32.

The context is entered by the models themselves, in `forward` and around the loss of a pipeline's last stage,
so that training, evaluation, generation and recomputed segments compute alike.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from neox_config import Resolved
from neox_model.assembly.choices import DTYPES

__all__ = ["Autocast", "build_autocast"]

# Returns a new context at each call.
Autocast = Callable[[], AbstractContextManager[Any]]


def build_autocast(resolved: Resolved, device: torch.device) -> Autocast:
    """Build the configured context (amp); without autocast, a context that changes nothing."""
    name = resolved.derived.autocast
    return nullcontext if name is None else partial(torch.autocast, device.type, dtype=DTYPES[name])
