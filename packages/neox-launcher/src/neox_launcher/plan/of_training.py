"""What concerns only trainings: parameters, and notes about a configuration."""

from neox_config.problems import COMMAND_LINE, Problem
from neox_config.schema.config import section_of

__all__ = ["is_noted"]

_WITHOUT_DATA = ("generate", "serve", "doctor")
_OF_TRAININGS = ("optimizer", "lr_schedule", "logging", "monitors", "autotuning", "activation_checkpointing")
_OF_DATA = ("training", "data", "data_efficiency")
_SAVING = (
    *("save", "save_interval", "save_growth", "save_interval_minutes", "extra_save_iters", "async_save"),
    *("keep_last_n_checkpoints", "hf_export", "hf_family"),
)


def _is_of_training(name: str, program: str) -> bool:
    """Return whether a parameter changes nothing but trainings; data and batches also change evaluations.

    Args:
        name: the parameter.
        program: the other program: generate, serve, evaluate or doctor.
    """
    try:
        section = section_of(name.partition(".")[0])
    except KeyError:
        return False
    if name in _SAVING or section in _OF_TRAININGS:
        return True
    return program in _WITHOUT_DATA and section in _OF_DATA and name != "seed"


# The sections of which the other programs repeat the notes, besides notes about their own command lines.
_THEIR_OWN = {
    "generate": ("generation",),
    "serve": ("generation", "serving"),
    "evaluate": ("generation",),
    "doctor": ("launch",),
}


def is_noted(note: Problem, program: str) -> bool:
    """Return whether a program prints a note about the configuration.

    A training prints all: its files describe it. Other programs read the same files later, and print only
    notes about their own settings and their command line.
    """
    if program == "train":
        return True
    if _is_of_training(note.name, program):
        return False
    if note.place is not None and note.place.file == COMMAND_LINE:
        return True
    try:
        return section_of(note.name.partition(".")[0]) in _THEIR_OWN[program]
    except KeyError:
        return False
