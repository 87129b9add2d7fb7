"""Low-rank adapters of experts: their formula, gradients and merged form, alone and on two ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.initialization import build_init_method, initialize_parameters
from neox_model.layers.experts import ExpertBlocks, Experts, Router, grouped_product, looped_product
from neox_model.layers.mlp import GatedMLP
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.low_rank import LowRank, freeze_all_but_adapters
from support.distributed import run_ranks

WIDTH, INNER, NUMBER, RANK = 8, 16, 5, 4
FORM = LowRank(rank=RANK, alpha=6.0)
NORMAL = build_init_method("normal", std=0.5, hidden_size=WIDTH, num_layers=2)
NAMES = ("up", "gate", "down")


def hidden(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(6, 4, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def build(
    *,
    form: LowRank | None = FORM,
    names: tuple[str, ...] = NAMES,
    dtype: torch.dtype = torch.float64,
    group: Group = SINGLE_RANK,
    fills: bool = True,
    **options: Any,
) -> Experts:
    """Return gated experts with a shared one, with adapters whose B is filled."""
    init = {"init": NORMAL, "output_init": NORMAL, "group": group}
    adapters = dict.fromkeys(names, form) if form else {}
    later = {name: LowRank(RANK, 6.0, each.dropout, is_summed_later=True) for name, each in adapters.items()}
    shared = partial(GatedMLP, WIDTH, INNER, activation=functional.silu, bias=False, adapters=later, **init)
    blocks = {"activation": functional.silu, "is_gated": True, "adapters": adapters, **init, **options}
    layer = Experts(
        WIDTH,
        router=partial(Router, WIDTH, NUMBER, chosen=2, init=NORMAL, group=group),
        blocks=partial(ExpertBlocks, hidden_size=WIDTH, width=INNER, **blocks),
        init=NORMAL,
        shared=shared,
        has_shared_gate=True,
        group=group,
    )
    initialize_parameters(layer, seed=1)
    for number, (name, parameter) in enumerate(named_logical_parameters(layer)):
        if name.endswith(".b") and fills:
            whole = torch.randn(parameter.logical.shape, generator=torch.Generator().manual_seed(number))
            parameter.data = whole[tuple(slice(*each) for each in parameter.logical.slices)].clone()
        parameter.data = parameter.data.to(dtype)
    freeze_all_but_adapters(layer)
    return layer


def merged(layer: Experts) -> Experts:
    """Return experts without adapters, whose products are added to their matrices."""
    plain, scale = build(form=None), FORM.scale
    with torch.no_grad():
        for name in NAMES:
            pair, own = layer.experts.adapters[name], getattr(layer.shared, name).adapter
            getattr(plain.experts, name).add_(scale * torch.einsum("eir,ero->eio", pair.a, pair.b))
            getattr(plain.shared, name).weight.add_(scale * own.b @ own.a)
    return plain


def test_an_adapter_is_its_formula_in_the_matrices_with_its_gradients() -> None:
    """The gradients of A and B follow from those of the whole matrix: of B, s A^T W', of A, s W' B^T."""
    layer, inputs = build(), hidden()
    whole = merged(layer)
    assert not torch.allclose(layer(inputs)[0], build(form=None)(inputs)[0])
    torch.testing.assert_close(layer(inputs)[0], whole(inputs)[0])
    for each in (layer, whole):
        each(inputs)[0].square().sum().backward()
    for name in NAMES:
        pair, of_whole = layer.experts.adapters[name], getattr(whole.experts, name).grad
        torch.testing.assert_close(pair.b.grad, FORM.scale * pair.a.mT @ of_whole)
        torch.testing.assert_close(pair.a.grad, FORM.scale * of_whole @ pair.b.mT)


def test_trained_steps_are_those_of_the_merged_formula() -> None:
    """Three steps of SGD on A and B, and on the same A and B as leaves of the merged matrices."""
    layer, inputs = build(), hidden()
    plain = build(form=None)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in trained(layer).items()}
    for _ in range(3):
        matrices = dict(plain.named_parameters())
        for name in NAMES:
            a, b = (leaves[f"experts.adapters.{name}.{side}"] for side in "ab")
            matrices[f"experts.{name}"] = matrices[f"experts.{name}"] + FORM.scale * a @ b
            a, b = (leaves[f"shared.{name}.adapter.{side}"] for side in "ab")
            matrices[f"shared.{name}.weight"] = matrices[f"shared.{name}.weight"] + FORM.scale * b @ a
        expected = torch.func.functional_call(plain, matrices, inputs)[0]
        found = layer(inputs)[0]
        for output, held in ((found, trained(layer)), (expected, leaves)):
            gradients = torch.autograd.grad(output.square().mean(), list(held.values()))
            with torch.no_grad():
                for value, gradient in zip(held.values(), gradients, strict=True):
                    value.sub_(gradient, alpha=0.05)
    for name, value in trained(layer).items():
        torch.testing.assert_close(value, leaves[name])


def trained(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in layer.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", [grouped_product, looped_product])
def test_new_adapters_add_nothing(dtype: torch.dtype, product: Any) -> None:
    options = {"dtype": dtype, "fills": False, "product": product, "adapter_product": looped_product}
    adapted, plain = (build(form=form, **options)(hidden(dtype))[0] for form in (FORM, None))
    assert torch.equal(adapted, plain)


def test_grouped_products_of_adapters_are_the_loops_to_the_last_bit() -> None:
    found = []
    for product in (grouped_product, looped_product):
        layer = build(dtype=torch.float32, product=product, adapter_product=product)
        output = layer(hidden(torch.float32))[0]
        output.square().sum().backward()
        found.append([output, *(value.grad for value in trained(layer).values())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("names", [("up",), ("down",), NAMES])
def test_only_adapters_are_trained_and_tokens_are_counted(names: tuple[str, ...]) -> None:
    """Also where nothing before the router is trained."""
    layer = build(names=names)
    layer(hidden())[0].sum().backward()
    expected = {f"experts.adapters.{name}.{side}" for name in names for side in "ab"}
    assert trained(layer).keys() == expected | {
        f"shared.{name}.adapter.{side}" for name in names for side in "ab"
    }
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == (name in trained(layer))
    assert layer.router.counts.sum() == 6 * 4 * 2


def test_dropout_is_of_the_adapters_input_alone() -> None:
    layer, inputs = build(form=LowRank(RANK, 6.0, dropout=0.5), names=("up",)), hidden()
    adapter, counts = layer.experts.adapters["up"], torch.tensor([3, 0, 2, 1, 0])
    rows = inputs.flatten(0, 1)[:6]
    torch.manual_seed(3)
    found = adapter(rows, counts)
    torch.manual_seed(3)
    dropped = functional.dropout(rows, 0.5)
    product = torch.cat(
        [
            part @ a @ b * FORM.scale
            for part, a, b in zip(dropped.split(counts.tolist()), adapter.a, adapter.b, strict=True)
        ]
    )
    torch.testing.assert_close(found, product)
    layer.eval()
    assert not torch.allclose(adapter(rows, counts), product)


def split(fault: bool) -> dict[str, Any]:
    """Return the output, and of each trained weight its block and gradient."""
    from neox_model.parallel.topology import create_groups

    group = create_groups(2, 0).model
    layer = build(group=group)
    if fault:
        for parameter in layer.parameters():
            if hasattr(parameter, "partial_gradient"):
                parameter.partial_gradient.remove()
    inputs = hidden().requires_grad_()
    output = layer(inputs)[0]
    output.square().sum().backward()
    gradients = {
        name: (parameter.logical.slices, parameter.grad.tolist())
        for name, parameter in named_logical_parameters(layer)
        if parameter.requires_grad
    }
    return {"output": output.tolist(), "inputs": inputs.grad.tolist(), "gradients": gradients}


@pytest.mark.parametrize("fault", [False, True])
def test_two_ranks_compute_the_gradients_of_one(*, fault: bool) -> None:
    """Without the sums over ranks, only those of the sides that are not split differ."""
    layer, inputs = build(), hidden().requires_grad_()
    output = layer(inputs)[0]
    output.square().sum().backward()
    wrong = set()
    for rank in run_ranks(split, size=2, fault=fault):
        torch.testing.assert_close(torch.tensor(rank["output"], dtype=torch.float64), output)
        torch.testing.assert_close(torch.tensor(rank["inputs"], dtype=torch.float64), inputs.grad)
        for name, (slices, gradient) in rank["gradients"].items():
            own = dict(layer.named_parameters())[name].grad[tuple(slice(*each) for each in slices)]
            if not torch.allclose(torch.tensor(gradient, dtype=torch.float64), own):
                wrong.add(name)
    whole = {f"experts.adapters.{name}.a" for name in ("up", "gate")}
    assert wrong == (whole | {"experts.adapters.down.b", "shared.down.adapter.b"} if fault else set())
