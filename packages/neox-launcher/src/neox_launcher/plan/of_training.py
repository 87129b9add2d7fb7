"""Parameters that only trainings use."""

from neox_config.schema.config import section_of

__all__ = ["is_of_training"]

_WITHOUT_DATA = ("generate", "serve", "doctor")
_OF_TRAININGS = ("optimizer", "lr_schedule", "logging", "monitors", "autotuning", "activation_checkpointing")
_OF_DATA = ("training", "data", "data_efficiency")
_SAVING = (
    *("save", "save_interval", "save_growth", "save_interval_minutes", "extra_save_iters", "async_save"),
    *("keep_last_n_checkpoints", "hf_export"),
)


def is_of_training(name: str, program: str) -> bool:
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
