"""Save and load checkpoints: logical tensors that any layout can read, written atomically.

Public names are loaded on first use, so that a program that reads only a manifest does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox_model.checkpoint.errors import CheckpointError
    from neox_model.checkpoint.load import ScheduleSource, load_checkpoint, load_weights
    from neox_model.checkpoint.parts import Restorable, RunParts, Schedule
    from neox_model.checkpoint.save import save_checkpoint

__all__ = [
    "CheckpointError",
    "Restorable",
    "RunParts",
    "Schedule",
    "ScheduleSource",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
]

_MODULES = {
    "CheckpointError": "neox_model.checkpoint.errors",
    "Restorable": "neox_model.checkpoint.parts",
    "RunParts": "neox_model.checkpoint.parts",
    "Schedule": "neox_model.checkpoint.parts",
    "ScheduleSource": "neox_model.checkpoint.load",
    "load_checkpoint": "neox_model.checkpoint.load",
    "load_weights": "neox_model.checkpoint.load",
    "save_checkpoint": "neox_model.checkpoint.save",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
