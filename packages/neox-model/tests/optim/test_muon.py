"""Muon against its formula in float64, and against torch's own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from neox_model.convert.forms import SEPARATE_QKV
from neox_model.layers.attention.parallel_attention import ParallelAttention
from neox_model.optim.muon import COEFFICIENTS, Muon, orthogonalized

SHAPES = ((6, 4), (4, 6), (5, 5))
# What torch.optim.Muon computes.
FORMER = {"coefficients": "quintic", "qkv": "together"}


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
    coefficients: str,
    scale: str = "original",
    row_beta: float = 0.0,
    cautious_decay: bool = False,
) -> Tensor:
    """The published algorithm: the polynomials act on the singular values, so they are applied to them."""
    weight = weight.double().numpy()
    mean, variance = np.zeros_like(weight), np.zeros(len(weight))
    (rows, columns), rates = weight.shape, COEFFICIENTS[coefficients]
    factors = {
        "original": max(1.0, rows / columns) ** 0.5,
        "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
    }
    for gradient in gradients:
        gradient = gradient.double().numpy()
        mean = momentum * mean + (1 - momentum) * gradient
        direction = momentum * mean + (1 - momentum) * gradient if nesterov else mean
        left, values, right = np.linalg.svd(direction, full_matrices=False)
        values = values / np.linalg.norm(direction)
        for step in range(steps):
            a, b, c = rates[min(step, len(rates) - 1)]
            values = a * values + b * values**3 + c * values**5
        step = left * values @ right
        if row_beta:
            variance = row_beta * variance + (1 - row_beta) * (step**2).mean(axis=1)
            step = step / (np.sqrt(variance) + 1e-8)[:, None]
            step = step * min(rows, columns) ** 0.5 / np.linalg.norm(step)
        agrees = step * weight >= 0 if cautious_decay else 1.0
        weight = weight - lr * decay * weight * agrees - lr * factors[scale] * step
    return torch.from_numpy(weight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("nesterov", "steps", "decay"), [(True, 5, 0.0), (False, 3, 0.3), (True, 8, 0.3)])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_muon_is_its_formula(shape, nesterov, steps, decay, coefficients, dtype, rounding):
    weight, *gradients = matrices(shape)
    options = {"lr": 0.1, "momentum": 0.8, "nesterov": nesterov, "coefficients": coefficients}
    expected = by_formula(weight, gradients, steps=steps, decay=decay, **options)
    options |= {"ns_steps": steps, "iteration_dtype": dtype}
    found = trained(weight, gradients, is_matrix=True, decay=decay, **options)
    assert float((found - expected).norm() / (expected - weight).norm()) < rounding


OPTIONS = (
    {"scale": "match_rms_adamw"},
    {"row_beta": 0.9},
    {"cautious_decay": True},
    {"scale": "match_rms_adamw", "row_beta": 0.95, "cautious_decay": True},
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_their_formulas_in_float64(shape, options):
    weight, *gradients = (matrix.double() for matrix in matrices(shape))
    options = {"lr": 0.1, "momentum": 0.8, "nesterov": True, "coefficients": "polar_express", **options}
    expected = by_formula(weight, gradients, steps=5, decay=0.3, **options)
    options |= {"iteration_dtype": torch.float64}
    found = trained(weight, gradients, is_matrix=True, decay=0.3, **options)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    plain = trained(weight, gradients, is_matrix=True, decay=0.3, lr=0.1, momentum=0.8)
    assert float((found - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_makes_the_updates_of_torch(shape, nesterov, scale):
    weight, *gradients = matrices(shape)
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 4}
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon([theirs], weight_decay=0.3, adjust_lr_fn=scale, **options)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
    options |= {"scale": scale, **FORMER}
    assert torch.equal(trained(weight, gradients, is_matrix=True, decay=0.3, **options), theirs.detach())


# Random matrices of these shapes have no singular value below 0.003 times their norm.
@pytest.mark.parametrize("shape", [(8, 20), (96, 32), (3, 64, 256), (256, 64)])
def test_a_step_is_the_polar_factor(shape):
    matrix = matrices(shape)[0].double()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    for coefficients, error in (("polar_express", 0.0063), ("quintic", 0.35)):
        step = orthogonalized(matrix, 5, coefficients=COEFFICIENTS[coefficients], dtype=torch.float64)
        values = torch.linalg.svdvals(step)
        assert error * 0.9 < float((values - 1).abs().max()) < error
        assert float(torch.linalg.svdvals(step - left @ right).max()) < error
    rounded = orthogonalized(matrix, 5, dtype=torch.bfloat16).double()
    assert float((torch.linalg.svdvals(rounded) - 1).abs().max()) < 0.03


def test_every_polynomial_is_the_best_between_the_values_that_the_one_before_leaves():
    """Its largest errors, four in turn above and below 1, are equal; the last one is their limit."""
    smallest, largest = 0.003, 1.0
    *rows, limit = COEFFICIENTS["polar_express"]
    for a, b, c in rows:
        # 1 % more than the largest value, for rounding.
        points = np.array([smallest, *np.sqrt(np.roots([5 * c, 3 * b, a]))[::-1], 1.01 * largest])
        assert (np.diff(points) > 0).all()
        errors = 1 - (a * points + b * points**3 + c * points**5)
        assert errors == pytest.approx(errors[0] * np.array([1, -1, 1, -1]), rel=1e-6)
        smallest, largest = 1 - errors[0], 1 + errors[0]
    assert errors[0] < 0.0063
    a, b, c = limit
    assert (a + b + c, a + 3 * b + 5 * c, 6 * b + 20 * c) == (1, 0, 0)


def attention(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    """Return the query-key-value weight of six heads of width 4 with two keys and values."""
    layer = ParallelAttention(
        24, 6, key_value_heads=2, core=nn.Identity, init=lambda *_: None, output_init=lambda *_: None
    )
    layer.qkv.weight.data = matrices(tuple(layer.qkv.weight.shape))[0].to(dtype)
    return layer.qkv.weight


def separate(matrix: Tensor) -> tuple[Tensor, ...]:
    return SEPARATE_QKV.to_theirs(matrix, SimpleNamespace(heads=6, kv_heads=2, head_width=4))


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_query_key_and_value_are_updated_as_three_matrices_or_as_their_heads(options):
    weight, *gradients = (matrix.double() for matrix in matrices((40, 24)))
    options = {"lr": 0.1, "iteration_dtype": torch.float64, **options}
    for qkv, number in (("separate", 1), ("per_head", None)):
        parameter = attention()
        group = {"params": [parameter], "weight_decay": 0.3, "is_of_matrices": True}
        optimizer = Muon([group], qkv=qkv, **options)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        found = separate(parameter.detach())
        wholes = [separate(matrix) for matrix in (weight, *gradients)]
        for part, (whole, *parts) in zip(found, zip(*wholes, strict=True), strict=True):
            heads = number or len(whole) // 4
            ones, *others = (each.chunk(heads) for each in (whole, *parts))
            expected = [
                trained(one, list(each), is_matrix=True, decay=0.3, **options)
                for one, *each in zip(ones, *others, strict=True)
            ]
            torch.testing.assert_close(part, torch.cat(expected), rtol=1e-10, atol=1e-11)
    alone = trained(weight, gradients, is_matrix=True, decay=0.3, **options)
    assert float((parameter.detach() - alone).abs().max()) > 1e-2


@pytest.mark.parametrize("shape", [(3,), (4, 3)])
@pytest.mark.parametrize("cautious", [False, True])
def test_other_weights_are_updated_by_adam(shape, cautious):
    """As by torch's AdamW in float64; with cautious decay, as by that of each element's own decay."""
    weight, *gradients = matrices(shape)
    theirs = torch.nn.Parameter(weight.double())
    optimizer = torch.optim.AdamW([theirs], lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0)
    for gradient in gradients:
        before = theirs.detach().clone()
        theirs.grad = gradient.double()
        optimizer.step()
        step = before - theirs.detach()
        with torch.no_grad():
            theirs.sub_(0.02 * 0.3 * before * (step * before >= 0 if cautious else 1.0))
    options = {"lr": 0.1, "adam_lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3, "cautious_decay": cautious}
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


NUMBER, INPUTS, OUTPUTS = 3, 6, 4


@pytest.mark.parametrize("shape", [(NUMBER, INPUTS, OUTPUTS), (NUMBER, OUTPUTS, INPUTS)])
@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_each_matrix_of_a_stack_is_updated_as_by_itself(shape, options):
    """A matrix of a stack is stored as [inputs, outputs], other weights as [outputs, inputs]."""
    weight, *gradients = (matrix.double() for matrix in matrices(shape))
    options = {"lr": 0.1, "decay": 0.3, "is_matrix": True, "iteration_dtype": torch.float64, **options}
    found = trained(weight, gradients, **options)
    alone = [
        trained(one.t().contiguous(), [each.t().contiguous() for each in several], **options).t()
        for one, *several in zip(weight, *gradients, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-10, atol=1e-11)
    # What all in one matrix, or the scale and the rows of the transposed shape, would give.
    together = trained(weight.flatten(0, 1), [each.flatten(0, 1) for each in gradients], **options)
    transposed = [
        trained(one, list(several), **options) for one, *several in zip(weight, *gradients, strict=True)
    ]
    assert float((found.flatten(0, 1) - together).abs().max()) > 1e-2
    is_symmetric = options.get("scale") == "match_rms_adamw" and "row_beta" not in options
    assert is_symmetric == torch.allclose(found, torch.stack(transposed))


def test_an_expert_without_gradients_is_only_decayed():
    weight, gradient = (matrix.double() for matrix in matrices((NUMBER, INPUTS, OUTPUTS), 2))
    gradient[1] = 0
    options = {"lr": 0.1, "decay": 0.3, "is_matrix": True, "row_beta": 0.9, "iteration_dtype": torch.float64}
    found = trained(weight, [gradient], **options)
    torch.testing.assert_close(found[1], weight[1] * (1 - 0.1 * 0.3), rtol=0, atol=1e-9)
    assert float((found[0] - weight[0]).abs().max()) > 1e-2
