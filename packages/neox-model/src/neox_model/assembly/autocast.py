"""Compute matrix products in 16 bits with torch.autocast, while weights and gradients stay in float32.

The context is entered by the models themselves, in `forward` and around the loss of a pipeline's last stage,
so that training, evaluation, generation and recomputed segments compute alike.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from neox_model.assembly.choices import DTYPES

__all__ = ["Autocast", "build_autocast"]

# Returns a new context at each call.
Autocast = Callable[[], AbstractContextManager[Any]]


def build_autocast(dtype: str | None, device: torch.device) -> Autocast:
    """Build a context that computes in a data type of `DTYPES`; with None, one that changes nothing."""
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype=DTYPES[dtype])
