"""Which calls of a custom operator pass through PyTorch's dispatcher, and that all compute the same."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from neox_kernels import (
    choice,
    cross_entropy,
    layer_norm,
    rms_norm,
    rotary,
    rotary_,
    scaled_softmax,
    split_rotary,
)
from neox_kernels import custom_operator as custom
from neox_kernels.status import OPERATORS
from support.refusals import refused

DIFFERENTIABLE = [
    operator for operator in OPERATORS if operator.name not in ("rotary_", "cross_entropy", "apex_layer_norm")
]
ALL = [*DIFFERENTIABLE, rotary_, cross_entropy]
differentiable = pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=lambda operator: operator.name)
every_operator = pytest.mark.parametrize("operator", ALL, ids=lambda operator: operator.name)
CPU = torch.device("cpu")
SHAPE = (4, 2, 3, 8)


class Seen(TorchDispatchMode):
    """Records the names of the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def ours(self):
        return [name for name in self.names if name.startswith("neox_kernels")]


def example(operator):
    make = operator.comparable_example or operator.example
    return make(SHAPE, torch.float32, CPU)


@pytest.fixture
def dispatched(monkeypatch):
    """Return the names of the operators that were called through the dispatcher."""
    names = []
    usual = custom.CustomOperator._dispatched

    def recorded(self, *args):
        names.append(self._name)
        return usual(self, *args)

    monkeypatch.setattr(custom.CustomOperator, "_dispatched", recorded)
    for owner in (each for each in custom_operators() if each._apply.__name__ == "_dispatched"):
        monkeypatch.setattr(owner, "_apply", owner._dispatched)
    return names


def custom_operators():
    import importlib

    modules = [importlib.import_module(each.reference.__module__) for each in ALL]
    found = [value for module in modules for value in vars(module).values()]
    return {value for value in found if isinstance(value, custom.CustomOperator)}


@every_operator
def test_eager_calls_need_no_dispatcher_forward_and_backward(operator, dispatched):
    assert choice.disagreement(operator, example(operator)) is None
    with torch.no_grad():
        operator.fused(
            *(each.detach() if isinstance(each, torch.Tensor) else each for each in example(operator))
        )
    assert dispatched == []


@differentiable
def test_dispatch_modes_see_one_operator_forward_and_backward(operator):
    with Seen() as seen:
        given = choice.results_and_gradients(operator.fused, example(operator))
    assert len(seen.ours) == 2, seen.ours
    torch.manual_seed(1234)
    for value, expected in zip(
        given, choice.results_and_gradients(operator.fused, example(operator)), strict=True
    ):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("operator", [layer_norm, rms_norm], ids=lambda operator: operator.name)
def test_no_zeros_are_made_for_statistics(operator):
    with Seen() as seen:
        choice.results_and_gradients(operator.fused, example(operator))
    after = seen.names[seen.names.index(seen.ours[0]) :]
    assert not [name for name in after if "zero" in name]


@every_operator
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_of_a_gpu_have_shapes_and_no_values(operator, inside):
    """Without gradients: PyTorch built for the CPU aborts at those of a fake GPU."""
    mode = FakeTensorMode()
    plain = example(operator)
    with mode:
        fake = [
            torch.empty(each.shape, dtype=each.dtype, device="cuda")
            if isinstance(each, torch.Tensor)
            else each
            for each in plain
        ]
        if inside:
            results = operator.fused(*fake)
    if not inside:
        results = operator.fused(*fake)
    expected = operator.reference(*plain)
    for result, value in zip(
        results if isinstance(results, tuple) else [results],
        expected if isinstance(expected, tuple) else [expected],
        strict=True,
    ):
        assert (result.shape, result.dtype, result.device.type) == (value.shape, value.dtype, "cuda")


@differentiable
def test_function_transforms_are_refused(operator):
    first, *others = example(operator)

    def total(value):
        results = operator.fused(value, *others)
        return (results[0] if isinstance(results, tuple) else results).square().sum()

    with refused(RuntimeError, "functorch transforms"):
        torch.func.grad(total)(first.detach())


@differentiable
def test_exported_programs_contain_the_operator(operator):
    arguments = example(operator)
    tensors = tuple(each.detach() for each in arguments if isinstance(each, torch.Tensor))
    others = [each for each in arguments if not isinstance(each, torch.Tensor)]

    class Layer(torch.nn.Module):
        def forward(self, *given):
            return operator.fused(*given, *others)

    exported = torch.export.export(Layer(), tensors)
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum(name.startswith("neox_kernels") for name in names) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_contain_the_operator():
    traced = torch.jit.trace(lambda scores: scaled_softmax.fused(scores, 0.5), torch.randn(2, 3))
    assert "neox_kernels::softmax_forward" in str(traced.inlined_graph)


@differentiable
@pytest.mark.parametrize("compiles", [False, True])
def test_second_derivatives_are_refused_with_the_remedy(operator, compiles):
    if operator is rotary or (operator is split_rotary and compiles):
        pytest.skip("rotary is linear: its backward pass is a rotation, which has a derivative")
    first, *others = example(operator)
    fused = torch.compile(operator.fused, backend="eager", fullgraph=True) if compiles else operator.fused
    result = fused(first, *others)
    result = result[-1] if isinstance(result, tuple) else result
    (gradient,) = torch.autograd.grad(result.square().sum(), first, create_graph=True)
    with refused(NotImplementedError, "no second derivatives"):
        gradient.sum().backward()


def test_checkpoints_and_saved_tensor_hooks_hold_for_direct_calls():
    x, weight, bias = example(layer_norm)
    expected = torch.autograd.grad(layer_norm.fused(x, weight, bias).square().sum(), (x, weight, bias))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        result = layer_norm.fused(x, weight, bias)
    assert packed == [SHAPE, (8,), (48,)]
    result = checkpoint(layer_norm.fused, x, weight, bias, use_reentrant=False)
    given = torch.autograd.grad(result.square().sum(), (x, weight, bias))
    for value, wanted in zip(given, expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("operator", [rotary_, cross_entropy], ids=lambda operator: operator.name)
def test_a_change_in_place_is_seen_by_autograd(operator, emulated):
    arguments = operator.example(SHAPE, torch.float32, CPU)
    weight = torch.ones_like(arguments[0]).requires_grad_()
    product = weight * arguments[0]
    operator.fused(*arguments)
    with refused(RuntimeError, "an inplace operation"):
        product.sum().backward()


def test_one_missing_gradient_of_two_counts_as_zero():
    query, key, cos, sin = example(rotary)
    given = torch.autograd.grad(rotary.fused(query, key, cos, sin)[0].sum(), (query, key))
    expected = torch.autograd.grad(rotary.reference(query, key, cos, sin)[0].sum(), query)
    torch.testing.assert_close(given[0], expected[0])
    assert not given[1].any()
