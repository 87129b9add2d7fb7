"""Checkpoints: logical tensors, so that any layout reads what any other wrote; complete or absent."""

from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.load import ScheduleSource, load_checkpoint, load_weights
from neox_model.checkpoint.save import Restorable, Schedule, save_checkpoint

__all__ = [
    "CheckpointError",
    "Restorable",
    "Schedule",
    "ScheduleSource",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
]
