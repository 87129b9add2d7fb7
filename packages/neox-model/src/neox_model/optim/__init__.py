"""Optimizers by name, in addition to the classes of torch.optim.

An optimizer may offer more than torch's: `averages_itself` (see `MixedPrecisionOptimizer`), `replica_states`
(see `checkpoint/replica_states.py`), and, if its replicas have different weights for a while,
`replicas_differ`, `shared_weight`, `shared_weights` and `restore_weights` (see `ZeroOneAdam`).
"""

from collections.abc import Mapping

__all__ = ["OPTIMIZERS"]

OPTIMIZERS: Mapping[str, str] = {
    "adam": "neox_model.optim.adam:adam",
    "adamw": "neox_model.optim.adam:adam",
    "cpu_adam": "neox_model.optim.adam:adam",
    "cpu_torch_adam": "torch.optim:Adam",
    "lamb": "neox_model.optim.lamb:Lamb",
    "lion": "neox_model.optim.lion:Lion",
    "madgrad_wd": "neox_model.optim.madgrad:MadgradWD",
    "muon": "neox_model.optim.muon:Muon",
    "onebitadam": "neox_model.extras.one_bit.adam:OneBitAdam",
    "onebitlamb": "neox_model.extras.one_bit.lamb:OneBitLamb",
    "zerooneadam": "neox_model.extras.one_bit.zero_one_adam:ZeroOneAdam",
    "sm3": "neox_model.optim.sm3:SM3",
}
"""Name in lower case -> function of parameter groups and keyword settings, imported when it is chosen."""
