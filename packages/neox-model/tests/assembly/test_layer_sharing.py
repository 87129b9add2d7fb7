"""`num_unique_layers`: layers with the same weights, on one rank and on pipeline stages."""

from typing import Any

import pytest
import torch
from torch import nn

from neox_model.assembly.model import build_model
from neox_model.layers.attention.kv_cache import logits_in_parts
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.logical import named_logical_parameters
from support.settings import specs_from


def model_of(**settings: Any) -> nn.Module:
    return build_model(*specs_from({"num_layers": 4, **settings}), SINGLE_PROCESS, vocab_size=11)


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 11, (2, 13), generator=torch.Generator().manual_seed(0))
    return model.loss_fn(model(tokens[:, :-1]), (tokens[:, 1:], torch.full((2, 12), 1 / 24)))


def layer_names(model: nn.Module) -> set[str]:
    return {name.split(".")[1] for name, _ in named_logical_parameters(model) if name.startswith("layers.")}


@pytest.mark.parametrize(("style", "owners"), [("grouped", [0, 1, 0, 1]), ("spaced", [0, 0, 2, 2])])
def test_layers_use_the_weights_of_their_owner_and_add_up_gradients(style, owners):
    shared = model_of(num_unique_layers=2, param_sharing_style=style)
    assert layer_names(shared) == {str(owner) for owner in owners}
    apart = model_of()
    with torch.no_grad():
        for index, owner in enumerate(owners):
            apart.stack[1 + index].load_state_dict(shared.stack[1 + owner].state_dict())
    torch.testing.assert_close(loss_of(shared), loss_of(apart), rtol=0, atol=0)
    for model in (shared, apart):
        loss_of(model).backward()
    for owner in set(owners):
        for name, parameter in shared.stack[1 + owner].named_parameters():
            users = [index for index, its in enumerate(owners) if its == owner]
            summed = sum(apart.stack[1 + index].get_parameter(name).grad for index in users)
            torch.testing.assert_close(parameter.grad, summed)


def test_sharing_no_layers_changes_nothing():
    assert layer_names(model_of(num_unique_layers=4)) == {"0", "1", "2", "3"}


def test_only_weights_are_shared():
    model = model_of(
        num_unique_layers=2,
        attention_config=["local", "bigbird", "global", "bigbird"],
        sparsity_config={"block": 1, "num_random_blocks": 2},
        apply_query_key_layer_scaling=True,
    )
    cores = [model.stack[1 + index].attention.core for index in range(4)]
    assert cores[0].pattern is not None
    assert cores[2].pattern is None
    assert not torch.equal(cores[1].pattern.layout, cores[3].pattern.layout)
    assert [core.coefficient for core in cores] == [1, 1, 2, 3]


def test_each_layer_caches_its_own_keys():
    model = model_of(num_unique_layers=1).eval()
    tokens = torch.randint(0, 11, (2, 12))
    expected = model(tokens)
    found = logits_in_parts(model, tokens, (0, 7, tokens.shape[1] - 1, tokens.shape[1]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
