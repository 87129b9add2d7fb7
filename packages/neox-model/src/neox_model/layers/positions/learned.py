"""A learned vector for each position."""

from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE, Group
from neox_model.parallel.logical import InitMethod, logical_parameter

__all__ = ["LearnedPosition"]


class LearnedPosition(nn.Module):
    """A table of `num_positions` vectors, whole on every rank.

    Args:
        num_positions: rows; the longest window.
        hidden_size: width of a row.
        init: fills the table.
        group: tensor-parallel ranks, which may each look their part of the sequence up.
    """

    def __init__(
        self, num_positions: int, hidden_size: int, *, init: InitMethod, group: Group = SINGLE
    ) -> None:
        super().__init__()
        self.weight = logical_parameter((num_positions, hidden_size), init=init, group=group)

    def forward(self, positions_SB: Tensor) -> Tensor:
        """The rows of `positions_SB`; [S, 1] serves all samples alike."""
        return functional.embedding(positions_SB, self.weight)
