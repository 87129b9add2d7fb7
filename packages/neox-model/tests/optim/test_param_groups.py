from types import SimpleNamespace

import torch
from torch import nn

from neox_model.optim.param_groups import split_by_weight_decay


def test_only_matrices_decay():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    decayed, plain = split_by_weight_decay(model.parameters(), 0.1)
    assert [group["weight_decay"] for group in (decayed, plain)] == [0.1, 0.0]
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3), (2, 3)]
    assert [tuple(p.shape) for p in plain["params"]] == [(2,), (2,), (2,)]


def test_the_logical_shape_decides_where_a_parameter_is_only_a_fragment():
    matrix, bias = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    matrix.logical = SimpleNamespace(shape=(4, 3), is_biases=False)
    bias.logical = SimpleNamespace(shape=(4,), is_biases=False)
    decayed, plain = split_by_weight_decay([bias, matrix], 0.1)
    assert decayed["params"] == [matrix]
    assert plain["params"] == [bias]


def test_tied_and_frozen_parameters_and_empty_groups_are_left_out():
    matrix, frozen = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    groups = split_by_weight_decay([matrix, matrix, frozen], 0.1)
    assert groups == [{"params": [matrix], "weight_decay": 0.1}]
