import pytest
import torch

from neox_model.parallel import gradient_reduction
from neox_model.parallel.gradient_reduction import GradientReduction
from support.distributed import run_ranks


def reduce_in_buckets() -> list:
    """Average gradients of several shapes and types; runs in every rank."""
    from neox_model.parallel.topology import create_groups

    gradient_reduction.BUCKET_ELEMENTS = 10
    data = create_groups(1, 1).data
    found = []
    for settings in (
        {},
        {"divides_first": True},
        {"predivide_factor": 2.0},
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
    ):
        base = [torch.arange(float(count)) / divisor for count, divisor in ((4, 3), (12, 3), (3, 1), (5, 3))]
        gradients = [values * (1 + data.rank) for values in base]
        gradients[2] = gradients[2].bfloat16()
        gradients[3] = gradients[3].view(1, 5).expand(2, 5).clone().t()
        GradientReduction(group=data, **settings)(gradients)
        expected = [values * 2 for values in base]
        expected[3] = expected[3].view(1, 5).expand(2, 5).t()
        found.append(
            max(float((g.float() - e).abs().max()) for g, e in zip(gradients, expected, strict=True))
        )
    return found


def test_gradients_become_their_mean_over_data_parallel_ranks():
    for found in run_ranks(reduce_in_buckets, size=3):
        assert found[:4] == pytest.approx([0.0] * 4, abs=1e-5)
        assert 0.0 < found[4] < 0.2


def test_a_single_rank_keeps_its_gradients():
    from neox_model.parallel.groups import SINGLE_RANK

    gradient = torch.tensor([1.0, 2.0])
    GradientReduction(group=SINGLE_RANK, divides_first=True)([gradient])
    assert gradient.tolist() == [1.0, 2.0]
