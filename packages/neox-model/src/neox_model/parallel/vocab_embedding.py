"""Token embeddings whose rows are split over tensor-parallel ranks.

Each rank holds ceil(vocabulary / ranks) rows. Where that does not divide, the last ranks hold rows beyond the
vocabulary; they stay zero, and no token points there.
"""

from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE, Group
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.sequence import leave_split

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Module):
    """Rows of a table of `vocab_size` vectors, looked up by token.

    Args:
        vocab_size: entries of the logical vocabulary.
        hidden_size: width of a row.
        init: fills the whole table.
        group: the ranks that share it.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, init: InitMethod, group: Group = SINGLE) -> None:
        super().__init__()
        self.group = group
        self.weight = logical_parameter(
            (vocab_size, hidden_size), init=init, group=group, split_dim=0, pad=True
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of `tokens` (any shape), with the width as a last dimension.

        Whole on every rank; where the group splits the sequence (dimension 0), this rank's part of it.
        """
        if self.group.size == 1:
            return functional.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local_tokens = tokens - self.group.rank * rows
        is_elsewhere = (local_tokens < 0) | (local_tokens >= rows)
        found = functional.embedding(local_tokens.masked_fill(is_elsewhere, 0), self.weight)
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return leave_split(found, self.group)
