"""Lion against its formula, one number at a time."""

import math

import pytest
import torch

from neox_model.optim.lion import Lion

# The sign of the second update depends on which of the two decays is used.
GRADIENTS = (0.5, -0.3, 0.25, -1.0, 3.0)


def by_formula(weight: float, *, lr: float, betas: tuple[float, float], decay: float) -> list[float]:
    """Algorithm 2 of the paper, in Python's float64."""
    mean, weights = 0.0, []
    for gradient in GRADIENTS:
        direction = math.copysign(1.0, betas[0] * mean + (1 - betas[0]) * gradient)
        weight -= lr * (direction + decay * weight)
        mean = betas[1] * mean + (1 - betas[1]) * gradient
        weights.append(weight)
    return weights


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.2)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lion_is_its_formula(betas, decay):
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = Lion([{"params": [weight], "weight_decay": decay}], lr=0.1, betas=betas)
    found = []
    for gradient in GRADIENTS:
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        found.append(weight.item())
    assert found == pytest.approx(by_formula(2.0, lr=0.1, betas=betas, decay=decay), rel=1e-6)


def test_a_weight_without_a_gradient_so_far_does_not_move():
    weight = torch.nn.Parameter(torch.tensor([2.0, 2.0]))
    optimizer = Lion([{"params": [weight]}], lr=0.1)
    weight.grad = torch.tensor([0.0, 5.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([2.0, 1.9])
    assert optimizer.state[weight].keys() == {"exp_avg"}
