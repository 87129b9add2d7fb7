"""Configure random layer-wise token dropping: the layers, and the number of kept tokens by iteration."""

import math
from dataclasses import dataclass

from torch import nn

from neox_config.extras.data_efficiency.fields import DataEfficiency
from neox_model.extras.token_dropping.layer import TokenDroppingTransformerLayer

__all__ = ["KeptTokens", "kept_tokens", "token_dropping_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The number of kept tokens by iteration, which increases linearly, in steps.

    Args:
        first: tokens kept in iteration 0.
        last: tokens kept from iteration `iterations` on.
        iterations: iterations of the increase.
        step: the number is rounded down to a multiple of it until it is `last`.

    Source: DeepSpeed's `fixed_linear` schedule of random layer-wise token dropping.
    """

    first: int
    last: int
    iterations: int
    step: int

    def at(self, iteration: int) -> int:
        """Return the number of tokens kept in an iteration, counted from 0; at least one."""
        if iteration >= self.iterations:
            return self.last
        grown = math.floor(self.first + (self.last - self.first) * iteration / self.iterations)
        return max(1, grown - grown % self.step)


def kept_tokens(efficiency: DataEfficiency) -> KeptTokens | None:
    """Return the configured schedule; None if all layers process all tokens."""
    ltd = efficiency.data_routing.random_ltd
    if not (efficiency.enabled and efficiency.data_routing.enabled and ltd.enabled):
        return None
    schedule = ltd.random_ltd_schedule
    settings = schedule.schedule_config
    # The configuration's rules require all numbers in an enabled block.
    return KeptTokens(
        first=schedule.min_value or 1,
        last=schedule.max_value or 1,
        iterations=settings.require_steps or 1,
        step=settings.seq_per_step or 1,
    )


def token_dropping_layers(model: nn.Module) -> list[TokenDroppingTransformerLayer]:
    """Return this rank's layers that drop tokens."""
    return [module for module in model.modules() if isinstance(module, TokenDroppingTransformerLayer)]
