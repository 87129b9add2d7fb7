"""Muon against its formula in float64, and against torch's own."""

import pytest
import torch
from torch import Tensor

from neox_model.optim.muon import Muon, orthogonalized

SHAPES = ((6, 4), (4, 6), (5, 5))


def matrices(shape: tuple[int, ...], number: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for _ in range(number)]


def trained(
    weight: Tensor, gradients: list[Tensor], *, decay: float = 0.0, is_matrix: bool, **options
) -> Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    group = {"params": [parameter], "weight_decay": decay, "is_of_matrices": is_matrix}
    optimizer = Muon([group], **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def by_formula(
    weight: Tensor,
    gradients: list[Tensor],
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    steps: int,
    decay: float,
) -> Tensor:
    """The published algorithm: the polynomial acts on the singular values, so it is applied to them."""
    weight, mean = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient.double()
        direction = momentum * mean + (1 - momentum) * gradient.double() if nesterov else mean
        left, values, right = torch.linalg.svd(direction, full_matrices=False)
        values = values / direction.norm()
        for _ in range(steps):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight = weight - lr * decay * weight - lr * scale * (left * values @ right)
    return weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("nesterov", "steps", "decay"), [(True, 5, 0.0), (False, 3, 0.3)])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_muon_is_its_formula(shape, nesterov, steps, decay, dtype, rounding):
    weight, *gradients = matrices(shape)
    options = {"lr": 0.1, "momentum": 0.8, "nesterov": nesterov}
    expected = by_formula(weight, gradients, steps=steps, decay=decay, **options)
    options |= {"ns_steps": steps, "iteration_dtype": dtype}
    found = trained(weight, gradients, is_matrix=True, decay=decay, **options)
    assert float((found - expected).norm() / (expected - weight).norm()) < rounding


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_makes_the_updates_of_torch(shape, nesterov):
    weight, *gradients = matrices(shape)
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 4}
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon([theirs], weight_decay=0.3, **options)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(trained(weight, gradients, is_matrix=True, decay=0.3, **options), theirs.detach())


def test_a_step_is_close_to_orthogonal():
    step = orthogonalized(matrices((8, 20))[0], 5, dtype=torch.float32).double()
    values = torch.linalg.svdvals(step)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(3,), (4, 3)])
def test_other_weights_are_updated_by_adam(shape):
    """As by torch's AdamW in float64."""
    weight, *gradients = matrices(shape)
    theirs = torch.nn.Parameter(weight.double())
    optimizer = torch.optim.AdamW([theirs], lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3)
    for gradient in gradients:
        theirs.grad = gradient.double()
        optimizer.step()
    options = {"lr": 0.1, "adam_lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3}
    found = trained(weight, gradients, is_matrix=False, decay=0.3, **options)
    torch.testing.assert_close(found.double(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_the_schedule_changes_both_learning_rates():
    weight, gradient = matrices((3,))[:2]
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = Muon([{"params": [parameter]}], lr=0.1, adam_lr=0.02)
    optimizer.param_groups[0]["lr"] = 0.05
    parameter.grad = gradient
    optimizer.step()
    # The first step of Adam is the sign of the gradient.
    torch.testing.assert_close(parameter.detach(), weight - 0.01 * gradient.sign(), rtol=1e-5, atol=1e-7)
