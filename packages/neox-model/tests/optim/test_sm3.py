"""SM3 against its formula, in float64 and one cover at a time."""

from itertools import product

import pytest
import torch
from torch import Tensor

from neox_model.optim.sm3 import SM3

RATE = 0.1


def by_formula(
    weight: Tensor, gradients: list[Tensor], *, momentum: float, beta: float, eps: float
) -> Tensor:
    """Algorithm SM3-II of the paper, element by element; every slice is a cover."""
    weight, step = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    places = list(product(*map(range, weight.shape)))
    stored = {(dim, index): 0.0 for place in places for dim, index in enumerate(place)}
    for gradient in gradients:
        largest = dict.fromkeys(stored, 0.0) if beta == 0 else dict(stored)
        for place in places:
            g, covers = float(gradient[place]), list(enumerate(place))
            smallest = min(stored[cover] for cover in covers)
            v = smallest + g**2 if beta == 0 else beta * smallest + (1 - beta) * g**2
            for cover in covers:
                largest[cover] = max(largest[cover], v)
            step[place] = momentum * step[place] + (1 - momentum) * g / (v + eps) ** 0.5
        stored = largest
        weight = weight - RATE * step
    return weight


def trained(weight: Tensor, gradients: list[Tensor], **options) -> tuple[Tensor, dict[str, Tensor]]:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = SM3([{"params": [parameter], "weight_decay": 0.5}], lr=RATE, **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), dict(optimizer.state[parameter])


@pytest.mark.parametrize("shape", [(4, 3), (5,), (1,)])
@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_sm3_is_its_formula(shape, beta, momentum):
    generator = torch.Generator().manual_seed(3)
    weight, *gradients = (torch.randn(shape, generator=generator) for _ in range(5))
    expected = by_formula(weight, gradients, momentum=momentum, beta=beta, eps=1e-3)
    found, _ = trained(weight, gradients, momentum=momentum, beta=beta, eps=1e-3)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_matrix_stores_one_number_per_row_and_column():
    gradients = [torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.5, 0.0]])]
    _, state = trained(torch.zeros(2, 3), gradients)
    assert {name: value.tolist() for name, value in state.items()} == {
        "accumulator_0": [[4.0], [9.0]],
        "accumulator_1": [[9.0, 4.0, 0.0]],
    }
    _, with_momentum = trained(torch.zeros(2, 3), gradients, momentum=0.9)
    assert with_momentum["momentum_buffer"].shape == (2, 3)


def test_an_element_without_a_gradient_does_not_move():
    weight, _ = trained(torch.tensor([2.0, 2.0]), [torch.tensor([0.0, 1e-12])])
    assert weight.tolist() == pytest.approx([2.0, 1.9])
