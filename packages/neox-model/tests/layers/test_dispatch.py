"""Experts that ranks divide compute what one rank computes with all of them."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from neox_model.initialization import build_init_method, initialize_parameters
from support.distributed import run_ranks

WIDTH, INNER, NUMBER = 8, 16, 4
NORMAL = build_init_method("normal", std=0.5, hidden_size=WIDTH, num_layers=2)
# Rows of each expert on each rank: of none on one rank, and of an expert that no rank sends to.
COUNTS = {
    2: [[3, 0, 5, 2], [4, 0, 0, 1]],
    4: [[3, 0, 5, 2], [4, 0, 0, 1], [0, 0, 0, 0], [1, 0, 6, 0]],
    "alone": [[7, 2, 0, 0], [3, 1, 0, 0]],
}


def blocks(*, group: Any, dtype: torch.dtype, product: Any) -> Any:
    from neox_model.layers.experts import ExpertBlocks

    made = ExpertBlocks(
        NUMBER,
        WIDTH,
        INNER,
        activation=functional.silu,
        is_gated=True,
        init=NORMAL,
        output_init=NORMAL,
        product=product,
        experts=group,
    )
    initialize_parameters(made, seed=1)
    return made.to(dtype)


def rows_of(rank: int, counts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(counts[rank]), WIDTH, generator=generator).to(dtype).requires_grad_()


def compare(counts: list[list[int]], dtype_name: str) -> list[float]:
    """Relative differences from all experts on one rank: results, gradients of rows and of weights."""
    from neox_model.layers.experts import Dispatcher, grouped_product, looped_product
    from neox_model.parallel.groups import SINGLE_RANK, Group

    dtype = getattr(torch, dtype_name)
    product = looped_product if dtype == torch.float64 else grouped_product
    rank, size = torch.distributed.get_rank(), len(counts)
    group = Group(rank, size, torch.distributed.group.WORLD, tuple(range(size)))
    own, rows = blocks(group=group, dtype=dtype, product=product), rows_of(rank, counts, dtype)
    found = Dispatcher(group)(rows, torch.tensor(counts[rank]), own)
    found.square().sum().backward()
    whole = blocks(group=SINGLE_RANK, dtype=dtype, product=product)
    for other in range(size):
        others = rows_of(other, counts, dtype)
        expected = whole(others, torch.tensor(counts[other]))
        expected.square().sum().backward()
        if other == rank:
            pairs = [(found, expected), (rows.grad, others.grad)]
    first = rank * NUMBER // size
    for mine, all_of_them in zip(own.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        pairs.append((mine.grad, all_of_them.grad[first : first + NUMBER // size]))
    assert [one.shape for one, _ in pairs] == [other.shape for _, other in pairs]
    return [_distance(*pair) for pair in pairs]


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) if one.numel() else 0.0


@pytest.mark.parametrize("case", COUNTS)
def test_divided_experts_are_those_of_one_rank(case: Any) -> None:
    counts = COUNTS[case]
    for differences in run_ranks(compare, size=len(counts), counts=counts, dtype_name="float64"):
        assert max(differences) < 1e-12
    for differences in run_ranks(compare, size=len(counts), counts=counts, dtype_name="bfloat16"):
        # The sums over rows have another order.
        assert differences[:2] == [0.0, 0.0]
        assert max(differences) < 0.02


def test_a_rank_alone_does_not_communicate() -> None:
    from neox_model.layers.experts import LOCAL_DISPATCH

    rows = torch.ones(3, 2)
    found = LOCAL_DISPATCH(rows, torch.tensor([1, 2]), lambda given, counts: given * counts.sum())
    assert torch.equal(found, 3 * rows)
