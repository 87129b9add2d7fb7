"""The engine of a configuration, and what it offers there."""

from neox_config.facts.engines import Capability, offer_of
from neox_config.schema.config import NeoXConfig

__all__ = ["engine_offers"]


def engine_offers(config: NeoXConfig, capability: Capability) -> bool:
    """Return True if the engine offers this with the configuration's ZeRO stage and layout."""
    stage = config.zero.zero_optimization.stage
    return offer_of(capability).includes(stage, uses_pipeline=config.parallelism.pipe_parallel_size >= 1)
