"""Token embeddings whose rows are split over tensor-parallel ranks.

Each rank holds ceil(vocabulary / ranks) rows. If the sizes do not divide, the last ranks have padding rows,
which stay zero and are not used by any token.
"""

from torch import Tensor, nn

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.sequence import from_row_parallel
from neox_model.parallel.token_sums import embedding

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Module):
    """Looks up embedding vectors by token.

    Args:
        vocab_size: size of the logical vocabulary.
        hidden_size: width of a vector.
        init: fills the whole table.
        group: the ranks that share it.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, init: InitMethod, group: Group = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.group = group
        self.weight = logical_parameter(
            (vocab_size, hidden_size), init=init, group=group, split_dim=0, pad=True
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of `tokens` (any shape), with the width as last dimension.

        The result is whole on every rank, or this rank's part if the group splits the sequence (dimension 0).
        """
        if self.group.size == 1:
            return embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local_tokens = tokens - self.group.rank * rows
        is_elsewhere = (local_tokens < 0) | (local_tokens >= rows)
        found = embedding(local_tokens.masked_fill(is_elsewhere, 0), self.weight)
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return from_row_parallel(found, self.group)
