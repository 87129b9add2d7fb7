"""Random layer-wise token dropping: in training, some layers process a random part of the tokens.

Dropped tokens skip the layer unchanged. Kept tokens stay in order, so that causal attention remains causal,
and keep their position ids and document ids, so that positions and masks are correct.

Source: arXiv:2211.11586.
"""

from typing import Any

import torch
from torch import Tensor

from neox_model.layers.transformer_layer import TransformerLayer

__all__ = ["TokenDroppingTransformerLayer", "choose_tokens"]


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
