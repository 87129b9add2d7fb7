import math

import pytest
import torch

from neox_kernels import bias_gelu

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def exact(value, form):
    if form == "erf":
        return value * (1 + math.erf(value / math.sqrt(2))) / 2
    return value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))) / 2


@pytest.mark.parametrize("gelu_form", ["tanh", "erf"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 3, 7, 127, 1025, 5000])
def test_bias_gelu_equals_its_definition(width, dtype, gelu_form, form):
    x = torch.randn(2, 1, width, dtype=torch.float64).mul(3).to(dtype)
    bias = torch.randn(width, dtype=torch.float64).to(dtype)
    biased = x.double() + bias.double()
    expected = torch.tensor(
        [exact(value, gelu_form) for value in biased.flatten().tolist()], dtype=torch.float64
    )
    result = form(bias_gelu)(x, bias, gelu_form)
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.double(), expected.reshape(x.shape), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("gelu_form", ["tanh", "erf"])
def test_large_values_are_unchanged_and_large_negatives_are_zero(gelu_form, form):
    result = form(bias_gelu)(torch.tensor([1e4, -1e4, 50.0, -50.0, 0.0]), torch.zeros(5), gelu_form)
    assert result.tolist() == [1e4, 0.0, 50.0, 0.0, 0.0]


@pytest.mark.parametrize("gelu_form", ["tanh", "erf"])
@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
def test_bias_gelu_gradients(gelu_form, form):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, bias: form(bias_gelu)(x, bias, gelu_form), (x, bias))


def test_tanh_and_erf_forms_differ():
    x = torch.tensor([1.5], dtype=torch.float64)
    difference = bias_gelu(x, torch.zeros(1), "tanh") - bias_gelu(x, torch.zeros(1), "erf")
    assert 1e-5 < abs(difference.item()) < 1e-3


@pytest.mark.parametrize("gelu_form", ["tanh", "erf"])
@pytest.mark.parametrize("form", ["emulated"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fast_formulas_are_right_where_the_result_is_small(gelu_form, dtype, form):
    """A few roundings of the result, not of 1: approximations of tanh and erf lose them below -2."""
    x = torch.linspace(-4.5, 4.5, 4096, dtype=torch.float64).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    result = form(bias_gelu)(x, torch.zeros_like(x), gelu_form)
    expected = torch.nn.functional.gelu(wide, approximate="tanh" if gelu_form == "tanh" else "none")
    result.sum().backward()
    expected.sum().backward()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, atol=2e-7, rtol=rounding)
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=1e-6, rtol=rounding)
