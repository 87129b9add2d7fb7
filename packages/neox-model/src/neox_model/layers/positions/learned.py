"""Learned position embeddings."""

from torch import Tensor, nn

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.token_sums import embedding

__all__ = ["LearnedPosition"]


class LearnedPosition(nn.Module):
    """A learned vector per position, whole on every rank.

    Args:
        num_positions: number of positions, the longest window.
        hidden_size: width of a vector.
        init: fills the weight.
        offset: rows before that of the first position (OPT).
        group: tensor-parallel ranks; with sequence parallelism each embeds its part of the sequence.
    """

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        *,
        init: InitMethod,
        offset: int = 0,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.offset = offset
        self.weight = logical_parameter((offset + num_positions, hidden_size), init=init, group=group)

    def forward(self, positions_SB: Tensor) -> Tensor:
        """Return the vectors of `positions_SB`; [S, 1] broadcasts over the batch."""
        rows_SB = positions_SB + self.offset if self.offset else positions_SB
        return embedding(rows_SB, self.weight)
