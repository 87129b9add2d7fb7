"""Random layer-wise token dropping: a layer that processes a part of the tokens, and how many by iteration.

Dropped tokens skip the layer unchanged. Kept tokens stay in order, so that causal attention remains causal,
and keep their position ids and document ids, so that positions and masks are correct.

Source: arXiv:2211.11586.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neox_config.extras.data_efficiency.fields import DataEfficiency
from neox_model.layers.transformer_layer import TransformerLayer

__all__ = [
    "KeptTokens",
    "TokenDroppingTransformerLayer",
    "choose_tokens",
    "kept_tokens",
    "token_dropping_layers",
]


def choose_tokens(length: int, batch: int, kept: int, device: torch.device) -> Tensor:
    """Return position_ids_KB: `kept` of `length` positions for each sample, random and sorted.

    Drawn from the device's default generator, which is the same on all tensor-parallel ranks.
    """
    return torch.rand(length, batch, device=device).argsort(dim=0)[:kept].sort(dim=0).values


class TokenDroppingTransformerLayer(TransformerLayer):
    """A transformer layer that processes `kept_tokens` random tokens of each sample, in evaluation all.

    Args:
        options: arguments of TransformerLayer.

    Attributes:
        kept_tokens: number of tokens to process; None: all.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept_tokens: int | None = None

    def block(
        self, hidden_SBD: Tensor, document_ids_BS: Tensor | None, position_ids_SB: Tensor | None = None
    ) -> Tensor:
        """Run the layer on the kept tokens; other tokens are unchanged."""
        length, batch, width = hidden_SBD.shape
        if not self.training or self.kept_tokens is None or self.kept_tokens >= length:
            return super().block(hidden_SBD, document_ids_BS, position_ids_SB)
        kept_KB = choose_tokens(length, batch, self.kept_tokens, hidden_SBD.device)
        index_KBD = kept_KB.unsqueeze(-1).expand(-1, -1, width)
        document_ids_BK = None if document_ids_BS is None else document_ids_BS.gather(1, kept_KB.t())
        result_KBD = super().block(hidden_SBD.gather(0, index_KBD), document_ids_BK, kept_KB)
        return hidden_SBD.scatter(0, index_KBD, result_KBD)


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
