"""Accuracies of a micro-batch count what is found, and nothing else."""

import math

import torch

from neox_model.extras.retrieval.head import RetrievalLoss

BEST = (1, 2)


def test_embeddings_that_are_no_numbers_find_nothing():
    embeddings_BE = torch.eye(4)
    loss = RetrievalLoss(best=BEST)
    with torch.no_grad():
        loss(embeddings_BE, embeddings_BE)
        loss(embeddings_BE * math.nan, embeddings_BE)
        loss(torch.ones(4, 4), torch.ones(4, 4))
    assert [each.tolist() for each in loss.hits] == [[4, 4, 4], [0, 0, 4], [0, 0, 4]]
