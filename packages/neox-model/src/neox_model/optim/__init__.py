"""Optimizers by name, in addition to the classes of torch.optim."""

from collections.abc import Callable

import torch

from neox_model.optim.adam import adam
from neox_model.optim.lamb import Lamb
from neox_model.optim.lion import Lion
from neox_model.optim.madgrad import MadgradWD
from neox_model.optim.muon import Muon
from neox_model.optim.one_bit_adam import OneBitAdam
from neox_model.optim.one_bit_lamb import OneBitLamb
from neox_model.optim.sm3 import SM3
from neox_model.optim.zero_one_adam import ZeroOneAdam

__all__ = ["OPTIMIZERS"]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam,
    "adamw": adam,
    "cpu_adam": adam,
    "cpu_torch_adam": torch.optim.Adam,
    "lamb": Lamb,
    "lion": Lion,
    "madgrad_wd": MadgradWD,
    "muon": Muon,
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
    "sm3": SM3,
}
"""Name in lower case -> function of parameter groups and keyword settings."""
