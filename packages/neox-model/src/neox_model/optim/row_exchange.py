"""Matrices whose rows are divided over ranks, exchanged so that each rank computes with one whole matrix."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed import all_to_all_single

from neox_model.parallel.groups import Group
from neox_model.parallel.param_shard import first_row

__all__ = ["RowExchange"]


class RowExchange:
    """Sends the rows of matrices to the ranks that compute with them, and rows of the results back.

    The first matrix is for the first rank of the group, and so on; further ranks only send and receive rows.
    A group of one does not communicate.

    Args:
        shapes: shape of each matrix, with the rows of all ranks; at most as many matrices as ranks.
        group: the ranks that divide the rows of every matrix (see `first_row`).
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], group: Group) -> None:
        assert 0 < len(shapes) <= group.size, "one matrix for each rank"
        self._group = group
        self._shapes = list(shapes)
        # Of each matrix, the elements in this rank's rows; of this rank's matrix, those of each rank.
        self._of_matrices = [self._elements(shape, group.rank) for shape in self._shapes]
        self._of_matrices += [0] * (group.size - len(shapes))
        self._of_ranks = [0] * group.size
        if group.rank < len(shapes):
            own = self._shapes[group.rank]
            self._of_ranks = [self._elements(own, rank) for rank in range(group.size)]

    def gather(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return the matrix that this rank computes with, or None if there is none for it. Collective.

        Args:
            parts: this rank's rows of each matrix, of one data type.
        """
        if self._group.size == 1:
            return parts[0]
        sent = torch.cat([part.reshape(-1) for part in parts])
        received = sent.new_empty(sum(self._of_ranks))
        self._exchange(received, sent, self._of_ranks, self._of_matrices)
        is_for_this_rank = self._group.rank < len(self._shapes)
        return received.view(self._shapes[self._group.rank]) if is_for_this_rank else None

    def scatter(self, result: Tensor | None, like: Tensor) -> list[Tensor]:
        """Return this rank's rows of the results of all ranks. Collective.

        Args:
            result: what this rank computed, of the shape of its matrix; None if it has none.
            like: a tensor with the data type and the device of the results.
        """
        if self._group.size == 1:
            assert result is not None
            return [result]
        sent = like.new_empty(0) if result is None else result.reshape(-1)
        received = like.new_empty(sum(self._of_matrices))
        self._exchange(received, sent, self._of_matrices, self._of_ranks)
        parts = received.split(self._of_matrices)
        return [part.view(-1, *shape[1:]) for part, shape in zip(parts, self._shapes, strict=False)]

    def _elements(self, shape: tuple[int, ...], rank: int) -> int:
        first, last = (first_row(shape[0], rank=each, size=self._group.size) for each in (rank, rank + 1))
        return (last - first) * prod(shape[1:])

    def _exchange(self, received: Tensor, sent: Tensor, takes: list[int], gives: list[int]) -> None:
        all_to_all_single(received, sent, takes, gives, group=self._group.process_group)
