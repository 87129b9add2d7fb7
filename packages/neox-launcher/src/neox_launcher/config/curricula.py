"""Which curricula are enabled, and which of them say how long samples are."""

from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.data_efficiency import TRUNCATES, DataSampling

__all__ = ["METRICS", "curricula_of_lengths", "enabled_sampling"]

METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


def curricula_of_lengths(config: NeoXConfig) -> list[str]:
    """The enabled blocks that say how long samples are."""
    sampling = enabled_sampling(config)
    found = ["curriculum_learning"] if config.data_efficiency.curriculum_learning.enabled else []
    if sampling is not None and sampling.curriculum_learning.enabled:
        found += [f"{METRICS}.{TRUNCATES}"] * (TRUNCATES in sampling.curriculum_learning.curriculum_metrics)
    return found


def enabled_sampling(config: NeoXConfig) -> DataSampling | None:
    """The block data_sampling, where it and the one around it are enabled."""
    efficiency = config.data_efficiency.data_efficiency
    return efficiency.data_sampling if efficiency.enabled and efficiency.data_sampling.enabled else None
