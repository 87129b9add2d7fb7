import pytest
import torch

from neox_model.optim.clipping import GradientClipper, global_gradient_norm
from neox_model.parallel.groups import ALONE, SINGLE, Group, Groups


def parameter(*gradient, **attributes):
    made = torch.nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("max_norm", "update"), [(0.0, -3.0), (10.0, -3.0), (1.0, -0.6)])
def test_gradients_are_scaled_down_to_the_largest_allowed_norm(max_norm, update):
    first, second = parameter(3.0), parameter(4.0)
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    clipper = GradientClipper(optimizer, max_norm=max_norm, groups=ALONE)
    optimizer.step()
    assert float(clipper.norm) == pytest.approx(5.0)
    assert float(first.detach()) == pytest.approx(update, rel=1e-5)


def test_what_stages_share_counts_once():
    shared = parameter(7.0, ds_pipe_replicated=True)
    assert float(global_gradient_norm([parameter(2.0), shared], ALONE)) == pytest.approx(2.0)


def test_on_later_model_ranks_only_split_parameters_count(monkeypatch):
    summed = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, group: summed.append((float(tensor), group))
    )
    second = Groups(
        data=SINGLE, model=Group(1, 2, "model", (0, 1)), pipe=SINGLE, world=SINGLE, control=SINGLE
    )
    whole, split = parameter(7.0), parameter(2.0, model_parallel=True)
    global_gradient_norm([whole, split], second)
    assert summed == [(4.0, "model")]
