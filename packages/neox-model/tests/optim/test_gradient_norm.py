import pytest
import torch

from neox_model.optim.gradient_norm import global_gradient_norm
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK, Group, Groups


def parameter(**attributes):
    made = torch.nn.Parameter(torch.zeros(1))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_the_norm_is_over_all_gradients():
    gradients = [torch.tensor([3.0]), torch.tensor([[4.0, 12.0]])]
    assert float(
        global_gradient_norm([parameter(), parameter()], gradients, SINGLE_PROCESS)
    ) == pytest.approx(13.0)


def test_a_copy_of_another_stage_is_not_counted():
    shared = parameter(is_stage_copy=True)
    gradients = [torch.tensor([2.0]), torch.tensor([7.0])]
    assert float(global_gradient_norm([parameter(), shared], gradients, SINGLE_PROCESS)) == pytest.approx(2.0)


def test_a_gradient_that_is_not_finite_makes_the_norm_not_finite():
    for value in (float("nan"), float("inf")):
        gradients = [torch.tensor([2.0]), torch.tensor([value, 1.0])]
        assert not global_gradient_norm([parameter(), parameter()], gradients, SINGLE_PROCESS).isfinite()


def test_on_later_model_ranks_only_split_parameters_count(monkeypatch):
    summed = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, op, group: summed.append((float(tensor), group))
    )
    second = Groups(
        data=SINGLE_RANK,
        model=Group(1, 2, "model", (0, 1)),
        pipe=SINGLE_RANK,
        world=SINGLE_RANK,
        control=SINGLE_RANK,
    )
    whole, split = parameter(), parameter(model_parallel=True)
    global_gradient_norm([whole, split], [torch.tensor([7.0]), torch.tensor([2.0])], second)
    assert summed == [(4.0, "model")]
