"""All learning-rate curves by the name under which a checkpoint stores them."""

from collections.abc import Mapping

from neox_config.facts.deepspeed_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from neox_config.facts.learning_rate import Curve, RepeatedDecay, WarmupStableDecay, WarmupThenDecay

__all__ = ["CURVES"]

CURVES: Mapping[str, type[Curve]] = {
    kind.__name__: kind
    for kind in (
        *(WarmupThenDecay, WarmupStableDecay, RepeatedDecay),
        *(WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle),
    )
}
