"""Enabled curricula, and those that set the length of samples."""

from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.data_efficiency import TRUNCATES, DataSampling

__all__ = ["METRICS", "curricula_of_lengths", "enabled_sampling"]

METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


def curricula_of_lengths(config: NeoXConfig) -> list[str]:
    """Return the names of the enabled blocks that set the length of samples."""
    sampling = enabled_sampling(config)
    found = ["curriculum_learning"] if config.data_efficiency.curriculum_learning.enabled else []
    if sampling is not None and sampling.curriculum_learning.enabled:
        found += [f"{METRICS}.{TRUNCATES}"] * (TRUNCATES in sampling.curriculum_learning.curriculum_metrics)
    return found


def enabled_sampling(config: NeoXConfig) -> DataSampling | None:
    """Return the block data_sampling if it and the block around it are enabled, else None."""
    efficiency = config.data_efficiency.data_efficiency
    return efficiency.data_sampling if efficiency.enabled and efficiency.data_sampling.enabled else None
