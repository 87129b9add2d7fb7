import pytest
import torch

from neox_kernels import bias_dropout_add
from neox_kernels.philox import KEEP_ALL, keep_below


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 3, 7, 127, 1025, 5000])
def test_without_dropout_the_result_is_the_sum(width, dtype, form):
    x, residual = torch.randn(2, 3, width, dtype=dtype), torch.randn(2, 3, width, dtype=dtype)
    bias = torch.randn(width, dtype=dtype)
    expected = (x.double() + bias.double() + residual.double()).to(dtype)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 2e-6)
    for p, training in [(0.0, True), (0.7, False)]:
        result = form(bias_dropout_add)(x, bias, residual, p, training)
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        form(bias_dropout_add)(x, None, residual, 0.0), x + residual, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropped_elements_are_zero_and_others_are_scaled(p, form):
    x, residual = torch.ones(10_000), torch.full((10_000,), 3.0)
    result = form(bias_dropout_add)(x, torch.zeros(10_000), residual, p)
    kept = result != 3.0
    # The fused operator rounds p to a multiple of 2^-16.
    torch.testing.assert_close(
        result[kept], torch.full_like(result[kept], 3.0 + 1 / (1 - p)), rtol=1e-4, atol=0
    )
    # Five standard deviations of the fraction that is kept.
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * (p * (1 - p) / 10_000) ** 0.5


def test_probability_one_returns_the_residual(form):
    residual = torch.randn(50)
    assert torch.equal(form(bias_dropout_add)(torch.randn(50), None, residual, 1.0), residual)


def test_mask_depends_on_the_generator(form):
    x, residual = torch.randn(1000), torch.zeros(1000)

    def dropped(seed):
        torch.manual_seed(seed)
        return form(bias_dropout_add)(x, None, residual, 0.5) == 0

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))


@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
def test_bias_dropout_add_gradients(form):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def function(x, bias, residual):
        torch.manual_seed(0)
        return form(bias_dropout_add)(x, bias, residual, 0.4)

    assert torch.autograd.gradcheck(function, (x, bias, residual))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
def test_the_factor_of_kept_elements_leaves_the_expected_value(p):
    x, residual = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    while not (result := bias_dropout_add.fused(x, None, residual, p)):
        pass
    assert result.item() * keep_below(p) == pytest.approx(KEEP_ALL, rel=1e-12)


@pytest.mark.parametrize("form", ["emulated"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 7])
def test_dropped_elements_may_be_infinite(dtype, width, form):
    x = torch.full((40, width), torch.inf, dtype=dtype)
    result = form(bias_dropout_add)(x, torch.zeros(width, dtype=dtype), torch.ones_like(x), 0.5)
    assert set(result.flatten().tolist()) == {1.0, torch.inf}
