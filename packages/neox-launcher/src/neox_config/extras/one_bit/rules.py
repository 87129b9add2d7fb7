"""Rules about 1-bit optimizers."""

from collections.abc import Iterator

from neox_config.derive.engine import engine_offers
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def replicas_that_compress_hold_all_states(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse ZeRO with optimizers that average over data-parallel ranks themselves."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if facts is None or not facts.replica_states:
        return
    if not engine_offers(c, "whole_weights"):
        yield Problem(
            "optimizer.type",
            "averages momenta over data-parallel ranks with one bit per element, but ZeRO averages the "
            "gradients in full precision, and partitions the momenta",
            "set zero_optimization.stage: 0, or use Adam",
        )
