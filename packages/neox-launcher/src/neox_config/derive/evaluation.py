"""What is evaluated."""

from neox_config.schema.config import NeoXConfig

__all__ = ["evaluates_texts"]


def evaluates_texts(config: NeoXConfig) -> bool:
    """Return True if tasks or texts are configured, which are evaluated without the run's data."""
    section = config.generation
    return bool(section.eval_tasks) or section.eval_data is not None
