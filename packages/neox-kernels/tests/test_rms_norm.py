import pytest
import torch

from neox_kernels import rms_norm

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
