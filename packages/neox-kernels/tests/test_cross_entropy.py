import math

import pytest
import torch
from torch.nn import functional

from neox_kernels import cross_entropy
from support.refusals import refused

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
ROWS = 6


def given(columns, dtype, padding=0):
    logits = (3.0 * torch.randn(ROWS, columns + padding, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, columns, (ROWS,))
    weights = torch.rand(ROWS, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    weights[2] = 0.0
    return logits, labels, weights


def exact(logits, labels, weights, width):
    """Autograd of PyTorch's cross entropy in float64."""
    wide = logits[:, :width].detach().double().requires_grad_()
    losses = functional.cross_entropy(wide, labels, reduction="none")
    (losses * weights.double()).sum().backward()
    return losses.detach(), functional.pad(wide.grad, (0, logits.shape[1] - width))


@pytest.mark.parametrize("dtype", TOLERANCE)
# The emulated GPU keeps rows of up to 160 KiB in shared memory.
@pytest.mark.parametrize("columns", [1, 7, 64, 127, 1000, 4096 + 8, 50_000])
@pytest.mark.parametrize("padding", [0, 5, 8])
def test_loss_and_gradient_are_those_of_autograd_in_float64(columns, padding, dtype, form):
    logits, labels, weights = given(columns, dtype, padding)
    losses, gradient = exact(logits, labels, weights, columns)
    memory = logits.clone()
    log_total, picked, result = form(cross_entropy)(memory, labels, weights, None, columns)
    assert result.data_ptr() == memory.data_ptr()
    rounding = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close((log_total - picked).double(), losses, atol=2e-5, rtol=2e-6)
    torch.testing.assert_close(result.double(), gradient, **rounding)
    assert not result[:, columns:].any()
    assert not result[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_weights_the_logits_stay(form, dtype):
    logits, labels, _ = given(40, dtype, padding=8)
    memory = logits.clone()
    log_total, picked, result = form(cross_entropy)(memory, labels, None, None, 40)
    assert torch.equal(result, logits)
    torch.testing.assert_close(log_total, logits[:, :40].float().logsumexp(-1))
    assert torch.equal(picked, logits.float()[torch.arange(ROWS), labels])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_halves_of_a_vocabulary_compute_the_whole(form, dtype):
    logits, labels, weights = given(33, dtype)
    whole = cross_entropy.reference(logits.clone(), labels, weights, None, 33)
    halves = [functional.pad(logits[:, :17], (0, 0)).clone(), functional.pad(logits[:, 17:], (0, 1)).clone()]
    starts, widths = (0, 17), (17, 16)
    parts = [
        form(cross_entropy)(half, labels - start, None, None, width)
        for half, start, width in zip(halves, starts, widths, strict=True)
    ]
    log_total = torch.stack([part[0] for part in parts]).logsumexp(0)
    torch.testing.assert_close(log_total, whole[0])
    torch.testing.assert_close(parts[0][1] + parts[1][1], whole[1])
    for half, start, width in zip(halves, starts, widths, strict=True):
        kept, _, result = form(cross_entropy)(half, labels - start, weights, log_total, width)
        assert torch.equal(kept, log_total)
        torch.testing.assert_close(
            result[:, :width], whole[2][:, start : start + width], atol=TOLERANCE[dtype], rtol=0
        )


def test_hidden_logits_and_rows_of_large_numbers(form):
    logits = torch.tensor(
        [[-math.inf, 1.0, 2.0, -math.inf], [500.0, 0.0, -3e38, 500.0], [-1e4, -1e4, -1e4, -1e4]]
    )
    labels, weights = torch.tensor([1, 0, 3]), torch.ones(3)
    losses, gradient = exact(logits, labels, weights, 4)
    log_total, picked, result = form(cross_entropy)(logits.clone(), labels, weights, None, 4)
    torch.testing.assert_close((log_total - picked).double(), losses, atol=1e-3, rtol=1e-6)
    torch.testing.assert_close(result.double(), gradient, atol=1e-4, rtol=1e-4)


def test_a_value_that_is_not_a_number_is_passed_on(form):
    logits = torch.randn(2, 40)
    logits[0, 37] = math.nan
    log_total, _, result = form(cross_entropy)(logits, torch.tensor([1, 2]), torch.ones(2), None, 40)
    assert log_total.isnan().tolist() == [True, False]
    assert result.isnan().all(dim=1).tolist() == [True, False]


def test_wrong_arguments_are_refused():
    logits, labels, weights = torch.randn(2, 8), torch.tensor([1, 2]), torch.ones(2)
    with refused(ValueError, "contiguous matrix"):
        cross_entropy.fused(logits.t(), labels, weights, None, 2)
    with refused(ValueError, "be 2 int64"):
        cross_entropy.fused(logits, labels.int(), weights, None, 8)
    with refused(ValueError, "be 2 torch.float32"):
        cross_entropy.fused(logits, labels, weights.double(), None, 8)
    with refused(ValueError, "between 0", "8 columns"):
        cross_entropy.fused(logits, labels, weights, None, 9)
