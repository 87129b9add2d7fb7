"""Random layer-wise token dropping: while training, some layers see a random part of the tokens.

The tokens that a layer does not see pass it by unchanged. Those it sees keep their order, so that attention
stays causal, and bring their places and documents along, so that positions and masks mean what they meant.

Source: arXiv:2211.11586.
"""

from typing import Any

import torch
from torch import Tensor

from neox_model.layers.transformer_layer import TransformerLayer

__all__ = ["TokenDroppingTransformerLayer", "choose_tokens"]


def choose_tokens(length: int, batch: int, kept: int, device: torch.device) -> Tensor:
    """places_KB: `kept` of `length` places for each sample, random and in order.

    Drawn from the device's default generator, which tensor-parallel ranks have alike.
    """
    return torch.rand(length, batch, device=device).argsort(dim=0)[:kept].sort(dim=0).values


class TokenDroppingTransformerLayer(TransformerLayer):
    """A transformer layer for `kept_tokens` random tokens of each sample; for all of them when evaluating.

    Args:
        options: what a TransformerLayer takes.

    Attributes:
        kept_tokens: how many tokens it sees; None: all.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept_tokens: int | None = None

    def block(
        self, hidden_SBD: Tensor, documents_BS: Tensor | None, places_SB: Tensor | None = None
    ) -> Tensor:
        """As a TransformerLayer's, of the kept tokens; the others pass by."""
        length, batch, width = hidden_SBD.shape
        if not self.training or self.kept_tokens is None or self.kept_tokens >= length:
            return super().block(hidden_SBD, documents_BS, places_SB)
        kept_KB = choose_tokens(length, batch, self.kept_tokens, hidden_SBD.device)
        index_KBD = kept_KB.unsqueeze(-1).expand(-1, -1, width)
        documents_BK = None if documents_BS is None else documents_BS.gather(1, kept_KB.t())
        result_KBD = super().block(hidden_SBD.gather(0, index_KBD), documents_BK, kept_KB)
        return hidden_SBD.scatter(0, index_KBD, result_KBD)
