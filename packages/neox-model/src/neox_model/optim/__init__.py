"""Optimizers: names that a configuration may give beside the classes of torch.optim."""

from collections.abc import Callable

import torch

from neox_model.optim.adam import adam

__all__ = ["OPTIMIZERS"]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": adam, "adamw": adam}
"""Name in lower case -> function of parameter groups and keyword settings."""
