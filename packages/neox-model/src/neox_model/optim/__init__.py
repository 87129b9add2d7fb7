"""Optimizers: names that a configuration may give beside the classes of torch.optim."""

from collections.abc import Callable

import torch

from neox_model.optim.adam import adam
from neox_model.optim.madgrad import MadgradWD

__all__ = ["ARGUMENTS", "OPTIMIZERS"]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam,
    "adamw": adam,
    "cpu_adam": adam,
    "cpu_torch_adam": torch.optim.Adam,
    "madgrad_wd": MadgradWD,
}
"""Name in lower case -> function of parameter groups and keyword settings."""

_ADAM = ("lr", "betas", "eps", "bias_correction")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "adam": (*_ADAM, "adam_w_mode"),
    "adamw": _ADAM,
    "cpu_adam": (*_ADAM, "adam_w_mode"),
    "cpu_torch_adam": ("lr", "betas", "eps"),
    "madgrad_wd": ("lr", "eps", "momentum"),
}
"""Which of the configured arguments each takes."""
