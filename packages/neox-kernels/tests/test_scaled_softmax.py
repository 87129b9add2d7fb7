import math

import pytest
import torch

from neox_kernels import scaled_causal_softmax, scaled_masked_softmax, scaled_softmax

SIZES = (1, 3, 7, 127, 1025, 5000)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def exact(scores, masked_out, scale):
    """Compute the definition in float64, row by row."""
    scores = scores.double() * scale
    hidden = torch.broadcast_to(masked_out, scores.shape).reshape(-1, scores.shape[-1])
    probabilities = torch.zeros_like(scores).reshape(hidden.shape)
    for row, (values, mask) in enumerate(zip(scores.reshape(hidden.shape), hidden, strict=True)):
        visible = values[~mask]
        if visible.numel() and visible.max() > -math.inf:
            weights = (visible - visible.max()).exp()
            probabilities[row, ~mask] = weights / weights.sum()
    return probabilities.reshape(scores.shape)


def causal_mask(queries, keys):
    return torch.arange(keys)[None, :] > torch.arange(queries)[:, None] + keys - queries


def apply(form, operator, scores, masked_out, scale):
    if operator is scaled_masked_softmax:
        return form(operator)(scores, masked_out, scale)
    return form(operator)(scores, scale)


OPERATORS = (scaled_softmax, scaled_causal_softmax, scaled_masked_softmax)
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("keys", SIZES)
def test_scaled_softmax_equals_its_definition(keys, dtype, form):
    scores = torch.randn(2, 3, keys, dtype=torch.float64).mul(4).to(dtype)
    expected = exact(scores, torch.zeros(1, dtype=torch.bool), 0.3)
    torch.testing.assert_close(
        form(scaled_softmax)(scores, 0.3).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert form(scaled_softmax)(scores, 0.3).dtype == dtype


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (3, 3), (7, 7), (127, 127), (5, 1025), (2, 5000), (4, 2)]
)
def test_scaled_causal_softmax_hides_the_keys_after_the_query(queries, keys, dtype, form):
    scores = torch.randn(2, queries, keys, dtype=torch.float64).mul(4).to(dtype)
    hidden = causal_mask(queries, keys)
    result = form(scaled_causal_softmax)(scores, 0.3)
    torch.testing.assert_close(
        result.double(), exact(scores, hidden, 0.3), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert torch.all(result.masked_select(hidden) == 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "mask_shape", [(2, 3, 7, 9), (2, 1, 7, 9), (1, 1, 7, 9), (7, 9), (1, 9), (2, 1, 1, 9), (1,)]
)
def test_scaled_masked_softmax_broadcasts_masks(mask_shape, dtype, form):
    scores = torch.randn(2, 3, 7, 9, dtype=torch.float64).mul(4).to(dtype)
    masked_out = torch.rand(mask_shape) < 0.4
    expected = exact(scores, masked_out, 0.3)
    result = form(scaled_masked_softmax)(scores, masked_out, 0.3)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.all(result.masked_select(masked_out.expand(scores.shape)) == 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_without_visible_keys_give_zeros_and_no_gradient(dtype, form):
    scores = torch.randn(2, 4, 6, dtype=dtype).requires_grad_()
    masked_out = torch.zeros(4, 6, dtype=torch.bool)
    masked_out[2] = True
    result = form(scaled_masked_softmax)(scores, masked_out, 0.5)
    result.square().sum().backward()
    assert torch.all(result[:, 2] == 0)
    assert torch.all(scores.grad[:, 2] == 0)
    assert torch.all(scores.grad.isfinite())
    assert torch.all(scores.grad[:, 0] != 0)


@every_operator
def test_minus_infinity_counts_as_hidden(operator, form):
    scores = torch.zeros(1, 3, 3)
    scores[0, 1] = -math.inf
    scores[0, 2, 0] = -math.inf
    scores.requires_grad_()
    result = apply(form, operator, scores, torch.zeros(3, dtype=torch.bool), 2.0)
    result.square().sum().backward()
    assert result[0, 1].tolist() == [0.0, 0.0, 0.0]
    assert result[0, 2].tolist() == [0.0, 0.5, 0.5]
    assert torch.all(scores.grad.isfinite())


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_scores_do_not_overflow(operator, dtype, form):
    huge = torch.finfo(dtype).max
    scores = torch.tensor([[huge, -huge, 0.0], [-huge, -huge, -huge], [3e4, 3e4, -3e4]], dtype=dtype)
    result = apply(form, operator, scores[None], torch.zeros(3, dtype=torch.bool), 1.0)[0].double()
    seen = torch.tensor([[1.0, 0, 0], [1 / 3] * 3, [0.5, 0.5, 0]], dtype=torch.float64)
    if operator is scaled_causal_softmax:
        seen[1] = torch.tensor([0.5, 0.5, 0])
    torch.testing.assert_close(result, seen, atol=2e-3, rtol=0)


@every_operator
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (3, 5, 5)])
@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
def test_softmax_gradients(operator, shape, form):
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    masked_out = torch.rand(shape[-2:]) < 0.3
    assert torch.autograd.gradcheck(lambda s: apply(form, operator, s, masked_out, 0.7), (scores,))


def test_score_far_above_the_others_has_probability_one(form):
    assert form(scaled_softmax)(torch.tensor([0.0, 200.0, 0.0])).tolist() == [0.0, 1.0, 0.0]


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [8, 264, 1032, 2056, 16392])
def test_rows_of_whole_vectors_forward_and_backward(operator, keys, dtype, form):
    """Rows of one warp, of several, and longer than the registers hold; causal rows end within a vector."""
    scores = torch.randn(2, 3, keys, dtype=torch.float64).mul(4).to(dtype).requires_grad_()
    masked_out = torch.rand(3, keys) < 0.3
    hidden = {
        scaled_softmax: torch.zeros(1, dtype=torch.bool),
        scaled_causal_softmax: causal_mask(3, keys),
        scaled_masked_softmax: masked_out,
    }[operator]
    above = torch.randn(2, 3, keys, dtype=torch.float64).to(dtype)
    result = apply(form, operator, scores, masked_out, -0.3)
    result.backward(above)
    expected = exact(scores.detach(), hidden, -0.3)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    p, dp = result.detach().double(), above.double()
    slope = -0.3 * p * (dp - (dp * p).sum(-1, keepdim=True))
    torch.testing.assert_close(scores.grad.double(), slope, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.all(scores.grad.masked_select(hidden) == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_whose_rows_are_not_contiguous(dtype, form):
    scores = torch.randn(2, 5, 64, dtype=torch.float64).to(dtype)
    for masked_out in (
        torch.rand(64, 5).lt(0.4).t(),
        torch.rand(5, 65).lt(0.4)[:, 1:],
        torch.rand(5, 1) < 0.4,
    ):
        result = form(scaled_masked_softmax)(scores, masked_out, 0.3)
        torch.testing.assert_close(
            result.double(), exact(scores, masked_out, 0.3), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
