"""The first of two products with one input adds the second's gradient of it, instead of autograd."""

import copy
from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from neox_model.layers.mlp import GatedMLP
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.parallel.low_rank import LowRank
from neox_model.parallel.sequence import gather_input

WIDTH, WIDE = 24, 40


class Sizes(TorchDispatchMode):
    """Counts sums of tensors, and products that add, by their number of elements."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("add", "add_", "addmm"):
            self.found[name.rstrip("_"), result.numel()] += 1
        return result


def fill(tensor, generator):
    tensor.normal_(std=0.2, generator=generator)


def pair(dtype=torch.float64, **options):
    """Return a gated MLP whose products add gradients, and one with the same weights, without."""
    torch.manual_seed(3)
    adding = GatedMLP(
        WIDTH, WIDE, activation=functional.silu, init=fill, output_init=fill, adds_gradients=True, **options
    ).double()
    for parameter in adding.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    # Of values that bfloat16 has, so that 16-bit results are compared with those of the same weights.
    adding = adding.bfloat16().to(dtype)
    plain = copy.deepcopy(adding)
    plain.adds_gradients = False
    return adding, plain


def train(module, dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(5, 2, WIDTH, generator=generator).bfloat16().to(dtype).requires_grad_()
    output, _ = module(hidden)
    (output * torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)).sum().backward()
    return [output, hidden.grad, *(parameter.grad for parameter in module.parameters())]


def check(adding, plain, dtype=torch.float64, tolerance=1e-12):
    for ours, wanted in zip(train(adding, dtype), train(plain, dtype), strict=True):
        if wanted is None:
            assert ours is None
            continue
        torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recomputes", [True, False])
def test_gradients_are_those_of_separate_products(bias, recomputes):
    check(*pair(bias=bias, recomputes_product=recomputes))


def test_16_bit_gradients_are_at_least_as_close_to_exact_ones():
    exact = train(pair()[1])
    apart = []
    for module in pair(torch.bfloat16):
        found = train(module, torch.bfloat16)[1].double()
        apart.append((found - exact[1]).norm() / exact[1].norm())
    assert apart[0] < 1.1 * apart[1] < 0.02


def test_adapters_add_their_own_gradients_to_frozen_matrices():
    form = LowRank(rank=3, alpha=6.0)
    adding, plain = pair(adapters={"up": form, "gate": form})
    for module in (adding, plain):
        for name in ("up", "gate", "down"):
            getattr(module, name).weight.requires_grad_(False)
    check(adding, plain)


def test_the_input_is_kept_only_for_the_gradient_of_a_matrix():
    adding, _ = pair()
    kept = []

    def keep(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    hidden = torch.randn(5, 2, WIDTH, dtype=torch.float64).requires_grad_()
    for is_trained in (True, False):
        for parameter in adding.parameters():
            parameter.requires_grad_(is_trained)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            adding(hidden)
        assert (hidden.data_ptr() in kept) == is_trained
        kept.clear()


def test_one_product_adds_and_autograd_does_not():
    adding, plain = pair(bias=False)
    size = 5 * 2 * WIDTH
    with Sizes() as ours:
        train(adding)
    with Sizes() as theirs:
        train(plain)
    assert (ours.found["add", size], ours.found["addmm", size]) == (0, 1)
    assert (theirs.found["add", size], theirs.found["addmm", size]) == (1, 0)


def test_what_a_hook_passes_to_one_matrix_is_not_passed_to_the_other():
    adding, plain = pair()
    for module in (adding, plain):
        module.up.register_forward_pre_hook(lambda _, given: (given[0] * 2.0, *given[1:]))
    check(adding, plain)


def test_what_a_hook_of_the_mlp_passes_on_reaches_both_matrices():
    results = []
    for module in pair():
        module.register_forward_pre_hook(lambda _, given: (given[0] * 2.0, *given[1:]))
        hidden = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, 1, WIDTH)
        results.append(module(hidden, gather_input(hidden, SINGLE_RANK))[0])
        results.append(module(hidden)[0])
    for result in results:
        assert torch.equal(result, results[-1])


def test_autocast_computes_the_products():
    adding, plain = pair(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = train(adding, torch.float32), train(plain, torch.float32)
    assert found[0].dtype == torch.bfloat16
    for ours, each in zip(found, wanted, strict=True):
        assert torch.equal(ours, each)


def test_second_derivatives_are_those_of_separate_products():
    results = []
    for module in pair(bias=False):
        hidden = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, 1, WIDTH).requires_grad_()
        output, _ = module(hidden)
        (first,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), module.up.weight)
        results.append(second)
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)
