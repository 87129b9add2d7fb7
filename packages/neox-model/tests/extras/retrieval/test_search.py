"""Exact search finds what sorting all scores finds, whatever the size of the parts."""

import numpy as np
import pytest
import torch

from neox_model.extras.retrieval import search

QUERIES, BLOCKS, WIDTH = 7, 101, 5


@pytest.fixture(params=[1, 10, 101, 1000])
def rows(request, monkeypatch):
    monkeypatch.setattr(search, "_ROWS", request.param)
    return request.param


def numbers(*shape):
    """Small whole numbers, so that scores are exact and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("count", [1, 5, 20, 101, 500])
def test_the_best_blocks_are_those_of_all_scores_in_order(rows, count):
    queries, blocks = numbers(QUERIES, WIDTH), numbers(BLOCKS, WIDTH)
    scores, found = search.best_blocks(queries, blocks.numpy(), count)
    wanted, order = (queries.double() @ blocks.double().T).sort(dim=1, descending=True, stable=True)
    assert found.tolist() == order[:, :count].tolist()
    assert scores.tolist() == wanted[:, :count].tolist()


def test_blocks_that_are_as_good_as_the_own_one_are_counted_without_it(rows):
    queries, blocks = numbers(QUERIES, WIDTH), numbers(BLOCKS, WIDTH)
    own_rows = torch.tensor([0, 1, 50, 99, 100, 10, 9])
    own_scores = numbers(QUERIES) * 3
    found = search.better_blocks(queries, own_scores, own_rows, blocks.numpy())
    scores = (queries @ blocks.T).numpy()
    wanted = [
        sum(score >= own and row != skipped for row, score in enumerate(line))
        for line, own, skipped in zip(scores, own_scores.tolist(), own_rows.tolist(), strict=True)
    ]
    assert found.tolist() == wanted


def test_a_score_that_is_no_number_finds_nothing(rows):
    queries, blocks = numbers(QUERIES, WIDTH), numbers(BLOCKS, WIDTH)
    scores = torch.full((QUERIES,), torch.nan)
    found = search.better_blocks(queries, scores, torch.zeros(QUERIES).long(), blocks.numpy())
    assert found.tolist() == [BLOCKS - 1] * QUERIES


def test_recall_of_the_search_is_one():
    """The best ten of 20,000 blocks are those of a float64 sort, for each of 64 queries."""
    generator = np.random.default_rng(0)
    queries = generator.standard_normal((64, 32)).astype(np.float32)
    blocks = generator.standard_normal((20_000, 32)).astype(np.float32)
    _, found = search.best_blocks(torch.from_numpy(queries), blocks, 10)
    wanted = np.argsort(-(queries.astype(np.float64) @ blocks.T.astype(np.float64)), axis=1)[:, :10]
    shared = [len(set(one) & set(other)) for one, other in zip(found.tolist(), wanted.tolist(), strict=True)]
    assert np.mean(shared) / 10 == 1.0
