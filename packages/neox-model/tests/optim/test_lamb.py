"""LAMB against its formula, in float64 and one whole tensor at a time."""

import pytest
import torch
from torch import Tensor

from neox_model.optim.lamb import Lamb

BETAS, EPS, RATE = (0.8, 0.9), 1e-3, 0.05


def by_formula(
    weight: Tensor,
    gradients: list[Tensor],
    *,
    decay: float = 0.0,
    limits: tuple[float, float] = (0.01, 10.0),
    is_corrected: bool = True,
) -> tuple[Tensor, list[float]]:
    """Algorithm 2 of the paper; also the trust ratios."""
    weight, ratios = weight.double(), []
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, gradient in enumerate(gradients, 1):
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient.double()
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient.double() ** 2
        corrected = [
            value / (1 - beta**number) if is_corrected else value
            for value, beta in zip((mean, square), BETAS, strict=True)
        ]
        direction = corrected[0] / (corrected[1].sqrt() + EPS) + decay * weight
        ratio = 1.0
        if weight.norm() > 0 and direction.norm() > 0:
            ratio = min(max(float(weight.norm() / direction.norm()), limits[0]), limits[1])
        ratios.append(ratio)
        weight = weight - RATE * ratio * direction
    return weight, ratios


def trained(weight: Tensor, gradients: list[Tensor], *, decay: float = 0.0, **options) -> Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    groups = [{"params": [parameter], "weight_decay": decay}]
    optimizer = Lamb(groups, lr=RATE, betas=BETAS, eps=EPS, **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def example(scale: float) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(5, 3, generator=generator) for _ in range(4)]
    return scale * torch.randn(5, 3, generator=generator), gradients


@pytest.mark.parametrize("is_corrected", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lamb_is_its_formula(decay, is_corrected):
    weight, gradients = example(0.5)
    expected, ratios = by_formula(weight, gradients, decay=decay, is_corrected=is_corrected)
    assert all(0.01 < ratio < 10 and ratio != 1 for ratio in ratios)
    found = trained(weight, gradients, decay=decay, bias_correction=is_corrected)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("scale", "limit"), [(100.0, 2.5), (1e-4, 0.3)])
def test_the_trust_ratio_stays_within_its_limits(scale, limit):
    weight, gradients = example(scale)
    expected, ratios = by_formula(weight, gradients[:1], limits=(0.3, 2.5))
    assert ratios == [limit]
    found = trained(weight, gradients[:1], min_coeff=0.3, max_coeff=2.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_weight_of_zeros_starts_with_a_ratio_of_one():
    _, gradients = example(0.0)
    expected, ratios = by_formula(torch.zeros(5, 3), gradients[:1])
    assert ratios == [1.0]
    torch.testing.assert_close(
        trained(torch.zeros(5, 3), gradients[:1]).double(), expected, rtol=1e-5, atol=0
    )


def test_every_tensor_has_a_ratio_of_its_own():
    """Two weights in one group are updated as if each was alone."""
    weight, gradients = example(0.5)
    parameters = [torch.nn.Parameter(weight.clone()), torch.nn.Parameter(9 * weight)]
    optimizer = Lamb([{"params": parameters}], lr=RATE, betas=BETAS, eps=EPS)
    for gradient in gradients:
        for parameter in parameters:
            parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(parameters[0].detach(), trained(weight, gradients))
    assert torch.equal(parameters[1].detach(), trained(9 * weight, gradients))
