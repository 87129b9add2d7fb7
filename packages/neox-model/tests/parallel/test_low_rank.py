"""Low-rank adapters: their gradient, their merged form, and what is trained."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from neox_model.initialization import initialize_parameters
from neox_model.layers.activations import ACTIVATIONS, GATED_ACTIVATIONS
from neox_model.layers.attention import DenseCore, ParallelAttention
from neox_model.layers.mlp import MLP, GatedMLP
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.low_rank import LowRank, adapter_parameters, freeze_all_but_adapters

FORM = LowRank(rank=3, alpha=5.0)


def normal(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.normal_(generator=generator)


def build(kind: type[nn.Module], form: LowRank | None = FORM) -> nn.Module:
    layer = kind(7, 10, init=normal, bias=True, adapter=form)
    initialize_parameters(layer, seed=4)
    freeze_all_but_adapters(layer)
    return layer


def fill_b(model: nn.Module) -> None:
    """Give each B values, so that adapters add something."""
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if name.endswith("adapter.b"):
            nn.init.normal_(parameter, std=0.3, generator=generator)


def merge(model: nn.Module) -> None:
    """Add each adapter's product to the weight of its matrix, and remove it."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.adapter is not None:
            with torch.no_grad():
                module.weight += FORM.scale * module.adapter.b @ module.adapter.a
            module.adapter = None


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_the_first_step_changes_the_product_by_the_gradient_of_the_matrix(kind) -> None:
    layer, rate = build(kind), 0.3
    inputs, target = torch.randn(6, 2, 7), torch.randn(6, 2, 10)
    whole = layer.weight.detach().clone().requires_grad_()
    functional.mse_loss(functional.linear(inputs, whole, layer.bias), target).backward()
    a = layer.adapter.a.detach().clone()
    optimizer = torch.optim.SGD([one for one in layer.parameters() if one.requires_grad], lr=rate)
    functional.mse_loss(layer(inputs)[0], target).backward()
    optimizer.step()
    effective = layer.weight + FORM.scale * layer.adapter.b @ layer.adapter.a
    expected = -rate * (FORM.alpha / FORM.rank) ** 2 * whole.grad @ a.t() @ a
    torch.testing.assert_close(effective - whole.detach(), expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 1e-2


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_new_adapter_adds_nothing(kind) -> None:
    inputs = torch.randn(6, 2, 7)
    assert torch.equal(build(kind)(inputs)[0], build(kind, None)(inputs)[0])


def models() -> dict[str, nn.Module]:
    adapters = dict.fromkeys(("qkv", "dense", "up", "gate", "down"), FORM)
    shared = {"init": normal, "output_init": normal, "adapters": adapters}
    gelu, gate = ACTIVATIONS["gelu"], GATED_ACTIVATIONS["swiglu"]
    return {
        "attention": ParallelAttention(8, 4, core=DenseCore, key_value_heads=2, **shared),
        "mlp": MLP(8, 12, activation=gelu, **shared),
        "gated mlp": GatedMLP(8, 12, activation=gate, **shared),
    }


@pytest.mark.parametrize(("name", "pairs"), [("attention", 2), ("mlp", 2), ("gated mlp", 3)])
def test_merged_matrices_give_the_same_output(name, pairs) -> None:
    model = models()[name]
    initialize_parameters(model, seed=4)
    assert len(list(adapter_parameters(model))) == 2 * pairs
    inputs = torch.randn(6, 2, 8)
    plain = model(inputs)[0]
    fill_b(model)
    adapted = model(inputs)[0]
    merge(model)
    merged = model(inputs)[0]
    assert not any(True for _ in adapter_parameters(model))
    scale = adapted.abs().max()
    torch.testing.assert_close(merged / scale, adapted / scale, rtol=0, atol=1e-5)
    assert (adapted - plain).abs().max() > 1e-2 * scale


def test_only_adapters_are_trained() -> None:
    model = models()["gated mlp"]
    freeze_all_but_adapters(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{matrix}.adapter.{side}" for matrix in ("up", "gate", "down") for side in "ab"}


def test_a_model_without_adapters_is_trained_whole() -> None:
    model = MLP(8, 12, activation=ACTIVATIONS["gelu"], init=normal, output_init=normal)
    freeze_all_but_adapters(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_dropout_drops_the_input_of_the_adapter_alone() -> None:
    layer = build(ColumnParallelLinear, LowRank(rank=3, alpha=5.0, dropout=0.5))
    inputs = torch.randn(6, 2, 7)
    plain = layer(inputs)[0]
    fill_b(layer)
    torch.manual_seed(1)
    dropped = layer(inputs)[0]
    torch.manual_seed(1)
    kept = functional.dropout(inputs, 0.5)
    expected = plain + functional.linear(kept, layer.adapter.b @ layer.adapter.a) * (5 / 3)
    torch.testing.assert_close(dropped, expected)
    layer.eval()
    whole = plain + functional.linear(inputs, layer.adapter.b @ layer.adapter.a) * (5 / 3)
    torch.testing.assert_close(layer(inputs)[0], whole)
