"""MADGRAD against its formula, one number at a time."""

import math

import pytest
import torch

from neox_model.optim.madgrad import MadgradWD

GRADIENTS = (0.5, -2.0, 0.25, 1.0, 3.0)


def by_formula(weight: float, *, lr: float, momentum: float, eps: float, decay: float) -> float:
    start, total, squares = weight, 0.0, 0.0
    for number, gradient in enumerate(GRADIENTS):
        scale = lr * math.sqrt(number + 1)
        total += scale * gradient
        squares += scale * gradient**2
        target = start - total / (squares ** (1 / 3) + eps)
        weight = momentum * weight + (1 - momentum) * target - lr * decay * weight
    return weight


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_madgrad_is_its_formula(momentum, decay):
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = MadgradWD([{"params": [weight], "weight_decay": decay}], lr=0.1, momentum=momentum, eps=1e-3)
    for gradient in GRADIENTS:
        weight.grad = torch.tensor([gradient])
        optimizer.step()
    expected = by_formula(2.0, lr=0.1, momentum=momentum, eps=1e-3, decay=decay)
    assert weight.item() == pytest.approx(expected, rel=1e-5)


def test_madgrad_states_can_be_saved():
    """One value per weight, or one number."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = MadgradWD([{"params": [weight]}], lr=0.1)
    weight.grad = torch.ones(3, 2)
    optimizer.step()
    shapes = {name: tuple(value.shape) for name, value in optimizer.state[weight].items()}
    assert shapes == {"step": (), "start": (3, 2), "grad_sum": (3, 2), "grad_sum_sq": (3, 2)}
