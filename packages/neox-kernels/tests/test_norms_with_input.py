"""The form of the norms that returns its input too, and adds the gradient that arrives there."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neox_kernels import layer_norm, rms_norm

NORMS = pytest.mark.parametrize("operator", [layer_norm, rms_norm], ids=lambda operator: operator.name)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


class Seen(TorchDispatchMode):
    """Records the names of the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def arguments(operator, dtype, width=129):
    return [
        each.detach().mul(3).to(dtype).requires_grad_()
        for each in operator.example((4, 3, width), torch.float64, torch.device("cpu"))
    ]


def gradients(form, given, epsilon=1e-5):
    """Return the input and the norm, and the gradients of a sum of both with weights."""
    given = [each.detach().clone().requires_grad_() for each in given]
    results = form(*given, epsilon)
    generator = torch.Generator().manual_seed(5)
    above = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in results]
    sum((weight.to(each.dtype) * each).sum() for weight, each in zip(above, results, strict=True)).backward()
    return [*results, *(each.grad for each in given)]


def exact(operator, given):
    wide = [each.double() for each in given]
    return gradients(lambda x, *rest: (x.clone(), operator.reference(x, *rest)), wide)


@NORMS
@pytest.mark.parametrize("form", ["custom", "emulated"], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_and_gradients_are_those_of_input_and_norm(operator, dtype, form):
    given = arguments(operator, dtype)
    found = gradients(operator.with_input, given)
    for ours, wanted in zip(found, exact(operator, given), strict=True):
        assert ours.dtype == dtype
        scale = wanted.abs().max()
        torch.testing.assert_close(ours.double() / scale, wanted / scale, atol=TOLERANCE[dtype], rtol=0.0)


@NORMS
def test_the_input_is_not_copied(operator):
    x, *rest = arguments(operator, torch.float32)
    returned, normed = operator.with_input(x, *rest)
    assert returned.data_ptr() == x.data_ptr()
    assert torch.equal(normed, operator.fused(x, *rest))
    with torch.no_grad():
        returned, normed = operator.with_input(x, *rest)
    assert returned is x
    assert torch.equal(normed, operator.fused(x, *rest))


@NORMS
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["input", "norm", "both"])
def test_each_result_has_its_gradient(operator, used):
    given = arguments(operator, torch.float64, width=5)
    assert torch.autograd.gradcheck(
        lambda *tensors: tuple(operator.with_input(*tensors, 1e-5)[place] for place in used), given
    )


@NORMS
def test_the_backward_pass_adds_the_gradient_by_itself(operator):
    x, *rest = arguments(operator, torch.float32)
    with Seen() as apart:
        (x + operator.fused(x, *rest)).sum().backward()
    with Seen() as together:
        returned, normed = operator.with_input(x, *rest)
        (returned + normed).sum().backward()
    assert together.names.count(f"{operator.name}_backward") == 1
    assert apart.names.count("add") == together.names.count("add") + 1


@NORMS
def test_compilers_see_the_operator(operator):
    given = arguments(operator, torch.float32)
    wanted = gradients(operator.with_input, given)
    compiled = torch.compile(operator.with_input, backend="aot_eager", fullgraph=True)
    for ours, each in zip(gradients(compiled, given), wanted, strict=True):
        torch.testing.assert_close(ours, each)
