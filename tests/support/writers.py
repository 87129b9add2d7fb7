"""The writers that a configuration opens."""

from neox_config import Resolved
from neox_config.spec.resume import flat_values
from neox_model.metrics.writers.base import MetricWriter
from neox_model.train.data.position import START, Position
from neox_model.train.writers import open_writers

__all__ = ["writers_of"]


def writers_of(resolved: Resolved, position: Position = START) -> list[MetricWriter]:
    """Open the writers of a configuration at a position in its data."""
    config = resolved.config
    return open_writers(
        config.logging,
        config.monitors,
        config.checkpoint,
        last_iteration=config.training.iterations,
        batch=resolved.run.batch.whole,
        values=flat_values(config),
        position=position,
    )
