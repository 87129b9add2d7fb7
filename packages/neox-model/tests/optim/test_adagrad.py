import pytest
import torch
from torch import nn

from neox_model.optim.adagrad import Adagrad
from support.refusals import refused


def trained(kind, **settings):
    torch.manual_seed(3)
    matrix, bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))
    optimizer = kind(
        [{"params": [matrix], "weight_decay": 0.2}, {"params": [bias], "weight_decay": 0.0}],
        lr=0.1,
        **settings,
    )
    for update in range(4):
        for parameter in (matrix, bias):
            parameter.grad = torch.randn_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + update)
        optimizer.step()
    return optimizer, [matrix, bias]


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_adagrad_equals_torch(settings):
    settings = {"lr_decay": 0.3, "initial_accumulator_value": 0.1, "eps": 1e-8, **settings}
    ours, found = trained(Adagrad, **settings)
    torchs, expected = trained(torch.optim.Adagrad, **settings)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert ours.state[one].keys() == torchs.state[other].keys() == {"step", "sum"}
        assert torch.equal(ours.state[one]["sum"], torchs.state[other]["sum"])
        assert ours.state[one]["step"] == 4


def test_states_belong_to_the_parameters_that_are_updated():
    placeholder = nn.Parameter(torch.ones(4))
    optimizer = Adagrad([{"params": [placeholder]}], lr=0.1)
    assert not optimizer.state
    partition = nn.Parameter(torch.ones(2))
    partition.grad = torch.ones(2)
    optimizer.param_groups[0]["params"] = [partition]
    optimizer.step()
    assert list(optimizer.state) == [partition]
    # DeepSpeed replaces torch's by another one.
    assert not isinstance(optimizer, torch.optim.Adagrad)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_decay": -1.0}, "lr_decay must be"),
        ({"eps": float("nan")}, "least 0, not"),
        ({"foreach": True, "fused": True}, "are mutually exclusive"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(settings, message):
    with refused(ValueError, message):
        Adagrad([{"params": [nn.Parameter(torch.ones(2))]}], lr=0.1, **settings)
