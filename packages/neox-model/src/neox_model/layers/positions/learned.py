"""A learned vector for each position."""

from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.logical import InitMethod, logical_parameter

__all__ = ["LearnedPosition"]


class LearnedPosition(nn.Module):
    """A table of `num_positions` vectors, whole on every rank.

    Args:
        num_positions: rows; the longest window.
        hidden_size: width of a row.
        init: fills the table.
    """

    def __init__(self, num_positions: int, hidden_size: int, *, init: InitMethod) -> None:
        super().__init__()
        self.weight = logical_parameter((num_positions, hidden_size), init=init)

    def forward(self, positions_SB: Tensor) -> Tensor:
        """The rows of `positions_SB`; [S, 1] serves all samples alike."""
        return functional.embedding(positions_SB, self.weight)
