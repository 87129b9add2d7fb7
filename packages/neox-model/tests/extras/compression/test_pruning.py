"""Masks of weights, rows and heads against plain readings, whole and split over ranks."""

import pytest
import torch

from neox_model.extras.compression.pruning import (
    Pruning,
    block_scores,
    keep_n_of_m,
    kept_blocks,
    largest,
    threshold_of,
)
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_largest_share_is_kept_and_of_equal_values_the_first(ratio, has_ties):
    values = torch.randn(7, 9, generator=torch.Generator().manual_seed(1))
    values = values.round() if has_ties else values
    order = sorted(range(63), key=lambda place: (-float(values.flatten()[place]), place))
    expected = torch.zeros(63, dtype=torch.bool)
    expected[order[: round(63 * ratio)]] = True
    assert torch.equal(largest(values, ratio), expected.view(7, 9))


def test_n_of_m_consecutive_weights_of_a_row_are_kept():
    scores = torch.tensor([[1.0, 4.0, 3.0, 2.0, 5.0, 5.0, 5.0, 5.0]])
    assert keep_n_of_m(scores, 2, 4).tolist() == [[False, True, True, False, True, True, False, False]]
    many = torch.rand(6, 12, generator=torch.Generator().manual_seed(1))
    assert (keep_n_of_m(many, 1, 3).view(6, 4, 3).sum(dim=2) == 1).all()


def test_blocks_have_the_mean_of_their_scores():
    scores = torch.arange(24.0).view(4, 6)
    found = block_scores(scores, (2, 3))
    assert found.tolist() == [[4.0, 7.0], [16.0, 19.0]]
    keep = kept_blocks(found > 6, (2, 3))
    assert keep.shape == (4, 6)
    assert keep[:2, :3].sum() == 0
    assert keep.sum() == 18


def scores_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.rand(5, 7, generator=generator), torch.rand(11, generator=generator) * 1e-30]


def threshold_on_ranks(ratio: float) -> float:
    groups = create_groups(1, 2)
    rank = groups.pipe.rank
    # The last stage has no such matrix.
    parts = scores_of(rank) if rank == 0 else []
    return float(threshold_of(parts, ratio, groups.pipe, device=CPU))


@pytest.mark.parametrize("ratio", [0.02, 0.3, 0.5, 0.9, 1.0])
def test_the_threshold_is_the_smallest_of_the_largest_values_exactly(ratio):
    values = torch.cat([part.flatten() for rank in range(2) for part in scores_of(rank)]).sort(
        descending=True
    )
    parts = [part for rank in range(2) for part in scores_of(rank)]
    found = threshold_of(parts, ratio, SINGLE_RANK, device=CPU)
    assert float(found) == float(values.values[round(ratio * 92) - 1])


def test_stages_find_the_threshold_of_all_their_weights():
    expected = float(threshold_of(scores_of(0), 0.3, SINGLE_RANK, device=CPU))
    assert run_ranks(threshold_on_ranks, size=2, ratio=0.3) == [expected] * 2


def learned(shape: tuple[int, int]) -> Pruning:
    pruning = Pruning(shape, split_dim=None, group=SINGLE_RANK, learned=True)
    with torch.no_grad():
        pruning.scores.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    pruning.is_on = True
    pruning.set_mask(largest(pruning.scores.detach(), 0.5))
    return pruning


@pytest.mark.parametrize(("shape", "repeats"), [((6, 8), 1), ((6, 1), 8), ((1, 4), 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_receive_the_gradient_of_the_mask_and_weights_that_of_what_is_kept(shape, repeats, dtype):
    pruning = learned(shape).to(dtype)
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    factor = torch.randn(6, 8, generator=torch.Generator().manual_seed(4)).to(dtype)
    keep = pruning.keep.repeat_interleave(repeats, dim=1).expand(6, 8)
    found = pruning(weight)
    assert torch.equal(found, weight * keep)
    (found * factor).sum().backward()
    assert torch.equal(weight.grad, factor * keep)
    of_mask = (factor * weight.detach()).double()
    expected = of_mask.view(shape[0], 6 // shape[0], shape[1], 8 // shape[1]).sum(dim=(1, 3))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(pruning.scores.grad.double(), expected, atol=tolerance, rtol=tolerance)


def test_pruned_rows_have_no_bias():
    pruning = learned((6, 1))
    bias = torch.arange(1.0, 7.0)
    assert torch.equal(pruning(bias), bias * pruning.keep.flatten())


def masks_of_ranks(dim: int) -> list[list[bool]]:
    group = create_groups(2, 0).model
    pruning = Pruning((4, 8), split_dim=dim, group=group, learned=True)
    whole = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        pruning.scores.copy_(whole.chunk(2, dim=dim)[group.rank])
    pruning.set_mask(largest(pruning.whole(pruning.scores.detach()), 0.25))
    return pruning.keep.tolist()


@pytest.mark.parametrize("dim", [0, 1])
def test_the_mask_of_a_split_matrix_is_that_of_the_whole(dim):
    found = torch.cat([torch.tensor(part) for part in run_ranks(masks_of_ranks, size=2, dim=dim)], dim=dim)
    whole = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    assert torch.equal(found, largest(whole, 0.25))
