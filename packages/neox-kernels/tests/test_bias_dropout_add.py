import pytest
import torch

from neox_kernels import bias_dropout_add


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 3, 7, 127, 1025, 5000])
def test_without_dropout_it_is_a_sum(width, dtype, form):
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
def test_dropped_elements_leave_the_residual_and_the_others_are_scaled(p, form):
    x, residual = torch.ones(10_000), torch.full((10_000,), 3.0)
    result = form(bias_dropout_add)(x, torch.zeros(10_000), residual, p)
    kept = result != 3.0
    torch.testing.assert_close(result[kept], torch.full_like(result[kept], 3.0 + 1 / (1 - p)))
    # Five standard deviations of the share that is kept.
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * (p * (1 - p) / 10_000) ** 0.5


def test_with_probability_one_only_the_residual_is_left(form):
    residual = torch.randn(50)
    assert torch.equal(form(bias_dropout_add)(torch.randn(50), None, residual, 1.0), residual)


def test_the_generator_decides_the_mask(form):
    x, residual = torch.randn(1000), torch.zeros(1000)

    def dropped(seed):
        torch.manual_seed(seed)
        return form(bias_dropout_add)(x, None, residual, 0.5) == 0

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))


@pytest.mark.parametrize("form", ["plain", "custom"], indirect=True)
def test_gradients_are_right(form):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def function(x, bias, residual):
        torch.manual_seed(0)
        return form(bias_dropout_add)(x, bias, residual, 0.4)

    assert torch.autograd.gradcheck(function, (x, bias, residual))
