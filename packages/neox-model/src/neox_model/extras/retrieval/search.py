"""Exact search for the largest inner products, by matrix products with a part of the embeddings at a time."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["best_blocks", "better_blocks"]

# Embeddings of width 128 that are on the device at a time are 32 MB.
_ROWS = 65536


def best_blocks(query_QE: Tensor, embeddings_NE: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
    """Return the scores and the numbers of the best blocks of each query, [Q, count], the best first.

    Of blocks with equal scores, the first ones are taken.

    Args:
        query_QE: embeddings of the queries, float32.
        embeddings_NE: those of all blocks, float32.
        count: number of blocks; fewer are returned if there are fewer.
    """
    scores_QK = query_QE.new_empty((len(query_QE), 0))
    rows_QK = torch.empty((len(query_QE), 0), dtype=torch.int64, device=query_QE.device)
    for first, scores_QN in _scores(query_QE, embeddings_NE):
        rows_N = torch.arange(first, first + scores_QN.shape[1], device=query_QE.device)
        scores_QK = torch.cat([scores_QK, scores_QN], dim=1)
        rows_QK = torch.cat([rows_QK, rows_N.expand(len(query_QE), -1)], dim=1)
        # A stable sort keeps the order of equal scores, which topk does not.
        scores_QK, order = scores_QK.sort(dim=1, descending=True, stable=True)
        scores_QK, rows_QK = scores_QK[:, :count], rows_QK.gather(1, order[:, :count])
    return scores_QK, rows_QK


def better_blocks(
    query_QE: Tensor, own_score_Q: Tensor, own_row_Q: Tensor, embeddings_NE: np.ndarray
) -> Tensor:
    """Return for each query the number of other blocks that score at least as high as its block.

    Args:
        query_QE: embeddings of the queries, float32.
        own_score_Q: the score of the block of each query.
        own_row_Q: the number of this block, whose embedding in `embeddings_NE` does not count.
        embeddings_NE: embeddings of all blocks, float32.
    """
    better_Q = torch.zeros_like(own_row_Q)
    for first, scores_QN in _scores(query_QE, embeddings_NE):
        # Where a score is NaN, too.
        is_better_QN = ~(scores_QN < own_score_Q.unsqueeze(1))
        is_here_Q = (own_row_Q >= first) & (own_row_Q < first + scores_QN.shape[1])
        place_Q = (own_row_Q - first).clamp(0, scores_QN.shape[1] - 1)
        own_Q = is_better_QN.gather(1, place_Q.unsqueeze(1)).squeeze(1) & is_here_Q
        better_Q += is_better_QN.sum(dim=1) - own_Q.long()
    return better_Q


def _scores(query_QE: Tensor, embeddings_NE: np.ndarray) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of the first block of a part, and the scores_QN of the queries with this part."""
    for first in range(0, len(embeddings_NE), _ROWS):
        # A copy: PyTorch warns about arrays that cannot be written to.
        part_NE = torch.from_numpy(np.array(embeddings_NE[first : first + _ROWS]))
        yield first, query_QE @ part_NE.to(query_QE.device).t()
