"""Save and load checkpoints: logical tensors that any layout can read, written atomically."""

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
