"""Rules about 1-bit optimizers."""

from collections.abc import Iterator

from neox_config.derive.engine import engine_offers
from neox_config.derive.optimizer_arguments import optimizer_facts
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def replicas_that_compress_hold_all_states(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse ZeRO with optimizers that average over data-parallel ranks themselves."""
    if optimizer_facts(c).replica_states and not engine_offers(c, "whole_weights"):
        yield Problem(
            "optimizer.type",
            "averages momenta over data-parallel ranks with one bit per element, but ZeRO averages the "
            "gradients in full precision, and partitions the momenta",
            "set zero_optimization.stage: 0, or use Adam",
        )
