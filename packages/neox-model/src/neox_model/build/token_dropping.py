"""Which layers see a part of the tokens while training, and how many of them over time."""

import math
from dataclasses import dataclass

from torch import nn

from neox_launcher.config import NeoXConfig
from neox_model.layers.token_dropping import TokenDroppingTransformerLayer

__all__ = ["KeptTokens", "kept_tokens", "layers_that_drop", "token_dropping_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The number of kept tokens by iteration: it grows evenly, in steps.

    Args:
        first: of iteration 0.
        last: from `iterations` on.
        iterations: from one to the other.
        step: the number is a multiple of it, rounded down, until it is `last`.

    Source: DeepSpeed's `fixed_linear` schedule of random layer-wise token dropping.
    """

    first: int
    last: int
    iterations: int
    step: int

    def at(self, iteration: int) -> int:
        """Tokens that a layer keeps in an iteration, counted from 0; at least one."""
        if iteration >= self.iterations:
            return self.last
        grown = math.floor(self.first + (self.last - self.first) * iteration / self.iterations)
        return max(1, grown - grown % self.step)


def kept_tokens(config: NeoXConfig) -> KeptTokens | None:
    """The configured schedule; None where all layers see all tokens."""
    efficiency = config.data_efficiency.data_efficiency
    ltd = efficiency.data_routing.random_ltd
    if not (efficiency.enabled and efficiency.data_routing.enabled and ltd.enabled):
        return None
    schedule = ltd.random_ltd_schedule
    pace = schedule.schedule_config
    # An enabled block has all its numbers, by the configuration's rules.
    return KeptTokens(
        first=schedule.min_value or 1,
        last=schedule.max_value or 1,
        iterations=pace.require_steps or 1,
        step=pace.seq_per_step or 1,
    )


def layers_that_drop(config: NeoXConfig) -> frozenset[int]:
    """Numbers of the layers that see a part of the tokens."""
    if kept_tokens(config) is None:
        return frozenset()
    return frozenset(config.data_efficiency.data_efficiency.data_routing.random_ltd.random_ltd_layer_id or ())


def token_dropping_layers(model: nn.Module) -> list[TokenDroppingTransformerLayer]:
    """This rank's layers that see a part of the tokens."""
    return [module for module in model.modules() if isinstance(module, TokenDroppingTransformerLayer)]
