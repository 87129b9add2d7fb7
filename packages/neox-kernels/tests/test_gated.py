import math

import pytest
import torch

from neox_kernels import bias_geglu, bias_swiglu
from support.refusals import refused

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def silu(z):
    return z / (1 + math.exp(-z))


def gelu_erf(z):
    return z * (1 + math.erf(z / math.sqrt(2))) / 2


def gelu_tanh(z):
    return z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2


CASES = [(bias_swiglu, (), silu), (bias_geglu, ("erf",), gelu_erf), (bias_geglu, ("tanh",), gelu_tanh)]


@pytest.mark.parametrize(("operator", "more", "function"), CASES, ids=["swiglu", "geglu-erf", "geglu-tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 3, 7, 127, 1025])
def test_gated_activation_equals_its_definition(width, dtype, form, operator, more, function):
    up, gate = torch.randn(2, 2, 3, width, dtype=torch.float64).to(dtype)
    up_bias, gate_bias = torch.randn(2, width, dtype=torch.float64).to(dtype)
    gates = [function(z) for z in (gate.double() + gate_bias.double()).flatten().tolist()]
    expected = (up.double() + up_bias.double()) * torch.tensor(gates, dtype=torch.float64).reshape(up.shape)
    result = form(operator)(up, gate, up_bias, gate_bias, *more)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("operator", [bias_swiglu, bias_geglu])
def test_biases_are_optional(operator, form):
    up, gate = torch.randn(2, 5, 16)
    zero = torch.zeros(16)
    torch.testing.assert_close(form(operator)(up, gate), form(operator)(up, gate, zero, zero))
    torch.testing.assert_close(form(operator)(up, gate, None, zero), form(operator)(up, gate, zero, None))


@pytest.mark.parametrize("width", [8, 5])
def test_halves_of_one_matrix_are_read_without_a_copy(width, form):
    joint = torch.randn(3, 4, 2 * width)
    up, gate = joint.chunk(2, dim=-1)
    expected = up * torch.nn.functional.silu(gate)
    torch.testing.assert_close(form(bias_swiglu)(up, gate), expected)


@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
@pytest.mark.parametrize(("operator", "more", "function"), CASES, ids=["swiglu", "geglu-erf", "geglu-tanh"])
def test_gated_activation_gradients(operator, more, function, form):
    tensors = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 5), (3, 5), 5, 5)]
    assert torch.autograd.gradcheck(lambda *given: form(operator)(*given, *more), tensors)


def test_unequal_shapes_are_refused():
    with refused(ValueError, "(2, 4)", "(2, 3)"):
        bias_swiglu.fused(torch.zeros(2, 4), torch.zeros(2, 3))
    with refused(ValueError, "up_bias", "(3,)"):
        bias_swiglu.fused(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(3))


@pytest.mark.parametrize("form", ["custom", "emulated"], indirect=True)
@pytest.mark.parametrize("operator", [bias_swiglu, bias_geglu], ids=lambda operator: operator.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("width", [64, 7])
def test_the_product_is_computed_again_with_the_gradients(width, biased, dtype, operator, form):
    joint = torch.randn(5, 3, 2 * width, dtype=dtype)
    up, gate = (half.requires_grad_() for half in joint.chunk(2, dim=-1))
    biases = [torch.randn(width, dtype=dtype, requires_grad=True) if given else None for given in biased]
    above = torch.randn(5, 3, width, dtype=dtype)
    given = [up, gate, *biases]
    product, *gradients = operator.again(above, *given)
    expected = form(operator)(*given)
    assert torch.equal(product, expected)
    wanted = torch.autograd.grad(expected, [each for each in given if each is not None], above)
    assert [each is None for each in gradients] == [each is None for each in given]
    for value, known in zip((each for each in gradients if each is not None), wanted, strict=True):
        assert torch.equal(value, known)
