"""Rules about what is logged."""

from collections.abc import Iterator

from neox_config.derive.engine import engine_offers
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def the_noise_scale_reads_gradients_before_the_update(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse the noise scale if the engine reduces, clips and applies gradients in one call."""
    if c.logging.log_gradient_noise_scale:
        yield from _requires_the_seam(c, "log_gradient_noise_scale")


def zero_gradients_are_counted_before_the_update(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse log_zero_gradients if the engine reduces, clips and applies gradients in one call."""
    if c.logging.log_zero_gradients:
        yield from _requires_the_seam(c, "log_zero_gradients")


def _requires_the_seam(c: NeoXConfig, name: str) -> Iterator[Problem]:
    if not engine_offers(c, "before_update"):
        yield Problem(
            name,
            "reads gradients before the update, which is not possible under ZeRO",
            "remove it, or set zero_optimization.stage: 0",
        )


def the_noise_scale_reads_averaged_gradients(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse the noise scale with optimizers that do not average gradients over data-parallel ranks."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if c.logging.log_gradient_noise_scale and facts is not None and facts.replica_states:
        yield Problem(
            "log_gradient_noise_scale",
            f"reads gradients averaged over data-parallel ranks, and {facts.name} averages momenta instead",
            "remove it, or use Adam",
        )
