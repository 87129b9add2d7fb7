"""Embed tokens, and optionally their positions, to sequence-first hidden states."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod
from neox_model.parallel.sequence import own_rows, sequence_stream
from neox_model.parallel.vocab_embedding import VocabParallelEmbedding

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """Computes dropout(scale * word + position), as hidden_SBD.

    Args:
        vocab_size: size of the logical vocabulary.
        hidden_size: model width.
        init: fills the word embeddings.
        scale: factor of the word embeddings, rounded to their dtype (as transformers does in Gemma).
        position: factory of the position embedding that is added (LearnedPosition, SinusoidalPosition); None:
            no position embedding.
        dropout: dropout probability.
        group: the ranks over which the vocabulary is split.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        init: InitMethod,
        scale: float = 1.0,
        position: Callable[[], nn.Module] | None = None,
        dropout: float = 0.0,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(vocab_size, hidden_size, init=init, group=group)
        self.position_embeddings = position() if position is not None else None
        self.scale = scale
        self.dropout = dropout
        self.group = group

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
        """Return the hidden states of `tokens_BS`, given as tensor or in a tuple.

        The tuples are `(tokens_BS, positions_BS)` and `(tokens_BS, document_ids_BS, positions_BS)`. Without
        `positions_BS`, positions count from the first token of the window. With document ids, the result is
        `(hidden_SBD, document_ids_BS)`, the input of the layers.
        """
        if isinstance(inputs, Tensor):
            return self._embed(inputs, None)
        tokens_BS, *document_ids_BS, positions_BS = inputs
        hidden_SBD = self._embed(tokens_BS, positions_BS)
        return (hidden_SBD, document_ids_BS[0]) if document_ids_BS else hidden_SBD

    def _embed(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        # Transpose the tokens, not their embeddings: the result is sequence-first without a copy.
        hidden_SBD = self.word_embeddings(tokens_BS.t())
        if self.scale != 1.0:
            hidden_SBD = hidden_SBD * torch.tensor(self.scale, dtype=hidden_SBD.dtype, device="cpu")
        if self.position_embeddings is not None:
            if positions_BS is None:
                positions_SB = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).unsqueeze(1)
            else:
                positions_SB = positions_BS.t()
            positions_SB = own_rows(positions_SB, self.group)
            hidden_SBD = hidden_SBD + self.position_embeddings(positions_SB).to(hidden_SBD.dtype)
        if not self.training or self.dropout == 0.0:
            return hidden_SBD
        with sequence_stream(self.group, hidden_SBD.device):
            return functional.dropout(hidden_SBD, self.dropout)
