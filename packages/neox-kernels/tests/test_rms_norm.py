import pytest
import torch

from neox_kernels import add_rms_norm, rms_norm
from support.refusals import refused

TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def exact(x, weight, epsilon):
    rows = [
        row / (row.square().mean() + epsilon).sqrt() * weight.double()
        for row in x.double().reshape(-1, x.shape[-1])
    ]
    return torch.stack(rows).reshape(x.shape)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 3, 7, 127, 1025, 5000])
def test_rms_norm_equals_its_definition(width, dtype, form):
    x = torch.randn(2, 2, width, dtype=torch.float64).mul(3).to(dtype)
    weight = torch.randn(width, dtype=torch.float64).to(dtype)
    result = form(rms_norm)(x, weight)
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.double(), exact(x, weight, 1e-8), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_row_of_zeros_stays_zero(form):
    x = torch.zeros(2, 8, requires_grad=True)
    result = form(rms_norm)(x, torch.ones(8))
    result.sum().backward()
    assert torch.equal(result, torch.zeros(2, 8))
    assert torch.all(x.grad.isfinite())


@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
def test_rms_norm_gradients(form):
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(form(rms_norm), (x, weight))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 7, 1025])
def test_norm_of_a_sum_equals_its_definition(width, dtype, form):
    x, residual = torch.randn(2, 2, 3, width, dtype=torch.float64).mul(3).to(dtype)
    weight = torch.randn(width, dtype=torch.float64).to(dtype)
    total, result = form(add_rms_norm)(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert result.dtype == dtype
    expected = exact(total, weight, 1e-5)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["sum", "normalized sum", "both"])
def test_gradients_of_the_norm_of_a_sum(form, used):
    sizes = ((2, 3, 5), (2, 3, 5), 5)
    tensors = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    assert torch.autograd.gradcheck(
        lambda *given: tuple(form(add_rms_norm)(*given)[place] for place in used), tensors
    )


def test_a_residual_of_another_shape_is_refused():
    with refused(ValueError, "(2, 4)", "(1, 4)"):
        add_rms_norm.fused(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(4))
