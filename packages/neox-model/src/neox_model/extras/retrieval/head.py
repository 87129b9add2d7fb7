"""Embed texts by their first token, and compare the embeddings of queries with those of blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_kernels.precision import widen
from neox_model.parallel.collectives import gather_from_group, gather_to_group
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import zero_init
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.sequence import to_column_parallel

__all__ = ["RetrievalHead", "RetrievalLoss"]


class RetrievalHead(nn.Module):
    """Projects the first hidden state of each text to its embedding.

    Args:
        size: width of the embeddings, E.
        hidden_size: model width.
        init: fills the weight.
        group: the tensor-parallel ranks, which split the embeddings.
    """

    def __init__(self, size: int, hidden_size: int, *, init: InitMethod, group: Group = SINGLE_RANK) -> None:
        super().__init__()
        self.group = group
        self.weight = logical_parameter((size, hidden_size), init=init, group=group, split_dim=0)
        self.bias = logical_parameter((size,), init=zero_init, group=group, split_dim=0)

    def forward(self, hidden_SBD: Tensor) -> Tensor:
        """Return embeddings_BE, whole on every rank."""
        first_BD = to_column_parallel(hidden_SBD, self.group)[0]
        return gather_from_group(functional.linear(first_BD, self.weight, self.bias), self.group)


class RetrievalLoss:
    """The cross entropy of each query's own block, among the blocks of all data-parallel ranks.

    The score of a block is the inner product of both embeddings; scores are computed in float32. The mean
    of the ranks' losses is that of all queries, and its gradients reach the blocks of every rank.

    Without gradients, as in evaluations, it counts the queries whose block is among the best.

    Args:
        group: the data-parallel ranks; a call is collective over it.
        best: numbers of blocks, k.

    Attributes:
        hits: for each call without gradients, int64 on the device: the number of queries whose block is among
            the best k, for each k, and of all queries.

    Source: arXiv:1906.00300, section 4.1.
    """

    def __init__(self, group: Group = SINGLE_RANK, *, best: Sequence[int] = ()) -> None:
        self.group = group
        self.best = tuple(best)
        self.hits: list[Tensor] = []

    def __call__(self, query_BE: Tensor, block_BE: Tensor) -> Tensor:
        """Return the mean loss of this rank's queries, a float32 scalar.

        Args:
            query_BE: embeddings of this rank's queries.
            block_BE: the embedding of the block of each of them.
        """
        query_BE, block_BE = widen(query_BE), widen(block_BE)
        scores_BC = query_BE @ gather_to_group(block_BE, self.group).t()
        own_B = self.group.rank * len(query_BE) + torch.arange(len(query_BE), device=scores_BC.device)
        if self.best and not torch.is_grad_enabled():
            own_B1 = scores_BC.gather(1, own_B.unsqueeze(1))
            # Blocks of an equal score count as better: a constant embedding finds nothing, nor does NaN.
            better_B = (~(scores_BC < own_B1)).sum(dim=1) - 1
            counts = [(better_B < k).sum() for k in self.best]
            self.hits.append(torch.stack([*counts, torch.full_like(counts[0], len(own_B))]))
        return functional.cross_entropy(scores_BC, own_B)
