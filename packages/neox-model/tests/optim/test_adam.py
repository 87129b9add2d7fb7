"""Adam and its switches against the formulas, one number at a time."""

import math
from pkgutil import resolve_name

import pytest
import torch

from neox_model.optim import OPTIMIZERS
from neox_model.optim.adam import UncorrectedAdam, adam

GRADIENTS = (0.5, -2.0, 0.25, 1.0)
LR, BETAS, EPS, DECAY = 0.1, (0.8, 0.95), 1e-3, 0.5


def updated(optimizer_of, start: float = 2.0) -> float:
    """Return a weight after all gradients."""
    weight = torch.nn.Parameter(torch.tensor([start]))
    optimizer = optimizer_of([{"params": [weight], "weight_decay": DECAY}])
    for gradient in GRADIENTS:
        weight.grad = torch.tensor([gradient])
        optimizer.step()
    return weight.item()


def by_formula(weight: float, *, is_decoupled: bool, is_corrected: bool) -> float:
    mean = square = 0.0
    for number, gradient in enumerate(GRADIENTS, start=1):
        if is_decoupled:
            weight -= LR * DECAY * weight
        else:
            gradient += DECAY * weight
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        first = 1 - BETAS[0] ** number if is_corrected else 1.0
        second = 1 - BETAS[1] ** number if is_corrected else 1.0
        weight -= LR * (mean / first) / (math.sqrt(square / second) + EPS)
    return weight


@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("is_corrected", [True, False])
def test_adam_is_its_formula_with_either_decay_and_either_correction(is_decoupled, is_corrected):
    def build(groups):
        switches = {"adam_w_mode": is_decoupled, "bias_correction": is_corrected}
        return adam(groups, lr=LR, betas=BETAS, eps=EPS, **switches)

    expected = by_formula(2.0, is_decoupled=is_decoupled, is_corrected=is_corrected)
    assert updated(build) == pytest.approx(expected, rel=1e-5)


def test_by_default_adam_is_torch_s_fused_adamw():
    weight = torch.nn.Parameter(torch.ones(1))
    for name in ("adam", "adamw", "cpu_adam"):
        made = resolve_name(OPTIMIZERS[name])([{"params": [weight]}], lr=0.1)
        assert type(made) is torch.optim.AdamW
        assert made.defaults["fused"]
    assert (
        type(resolve_name(OPTIMIZERS["cpu_torch_adam"])([{"params": [weight]}], lr=0.1)) is torch.optim.Adam
    )


def test_a_weight_without_gradient_stays_and_a_closure_s_loss_is_given():
    used, unused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = UncorrectedAdam([{"params": [used, unused], "weight_decay": DECAY}], lr=LR)

    def loss() -> torch.Tensor:
        value = (3 * used).sum()
        value.backward()
        return value

    assert optimizer.step(loss).item() == 3.0
    assert (used.item() < 1.0, unused.item()) == (True, 1.0)
