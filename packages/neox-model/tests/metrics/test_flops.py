"""Operations, parameters and time of modules, and the report."""

from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from neox_model.assembly.compilation import dense_attention
from neox_model.layers.attention import DenseCore, FlexCore
from neox_model.layers.attention.patterns import LocalPattern
from neox_model.metrics.flops import count_flops, profile_report
from neox_model.torch_compat import CPU_ATTENTION_FLOPS
from support.refusals import refused, shows

COUNTED = {"synchronize": lambda: None, "operators": CPU_ATTENTION_FLOPS}


class Model(nn.Module):
    """Two matrices, the first recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU())
        self.second = nn.Linear(8, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, inputs, use_reentrant=True))


def profile_of(model, inputs):
    ticks = count()
    with count_flops(model, **COUNTED, clock=lambda: float(next(ticks))) as profile:
        model(inputs).sum().backward()
    return profile


@pytest.fixture(scope="module")
def profile():
    return profile_of(Model(), torch.ones(5, 4, requires_grad=True))


def test_each_module_has_its_operations_and_those_of_its_parts(profile):
    found = {module.path: (module.flops, module.recomputed, module.calls) for module in profile.modules}
    first, second = 2 * 5 * 4 * 8, 2 * 5 * 8 * 3
    assert found == {
        "": (first + second, 0, 1),
        "first": (2 * first, first, 2),
        "first.0": (2 * first, first, 2),
        "first.1": (0, 0, 2),
        "second": (second, 0, 1),
    }
    assert (profile.forward, profile.recomputed) == (first + second, first)
    assert profile.flops == 4 * first + 3 * second
    assert sum(profile.operators.values()) == profile.flops


def test_modules_have_their_parameters_and_time(profile):
    assert [module.parameters for module in profile.modules] == [56, 32, 32, 0, 24]
    # Each reading of this clock is a second later: one at both ends of a pass, four inside `first`.
    seconds = {module.path: module.seconds for module in profile.modules}
    assert seconds == {"": 9.0, "first": 10.0, "first.0": 2.0, "first.1": 2.0, "second": 1.0}


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_product_that_is_added_in_place_counts(is_batched):
    shapes = [(5, 7), (5, 3), (3, 7)]
    total, left, right = (torch.ones(2, *shape) if is_batched else torch.ones(shape) for shape in shapes)
    with count_flops(nn.Identity(), **COUNTED) as profile:
        _ = total.baddbmm_(left, right) if is_batched else total.addmm_(left, right)
    assert profile.flops == (2 if is_batched else 1) * 2 * 5 * 3 * 7


def test_a_product_of_another_type_counts():
    """As the output matrix's gradient is summed on GPUs; the meta device has the operator, a CPU has not."""
    total = torch.empty(5, 7, device="meta")
    left, right = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((5, 3), (3, 7)))
    with count_flops(nn.Identity(), **COUNTED) as profile:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        torch.addmm(torch.empty(7, device="meta", dtype=torch.bfloat16), left, right)
    assert profile.flops == 2 * 2 * 5 * 3 * 7


@pytest.mark.parametrize("key_length", [6, 9])
def test_attention_counts_as_if_the_mask_hid_nothing(key_length):
    query = torch.ones(2, 3, 6, 4, requires_grad=True)
    key = torch.ones(2, 3, key_length, 4, requires_grad=True)
    with count_flops(nn.Identity(), **COUNTED) as profile:
        nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True).sum().backward()
    product = 2 * 2 * 3 * 6 * key_length * 4
    assert profile.flops == (2 + 5) * product


def test_compiled_functions_run_uncompiled():
    compiled: list[int] = []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph.forward

    model = torch.compile(nn.Linear(4, 8, bias=False), backend=backend)
    assert profile_of(model, torch.ones(5, 4)).flops == 2 * 2 * 5 * 4 * 8
    assert not compiled
    model(torch.ones(5, 4))
    assert compiled


def test_nothing_is_measured_after_an_error():
    model = Model()
    with refused(RuntimeError, "shapes"):
        profile_of(model, torch.ones(5, 3))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def report(profile, **settings):
    return profile_report(profile, **{"depth": -1, "top": 1, "is_detailed": True} | settings)


def test_the_report_ends_at_the_depth_and_names_the_largest_classes(profile):
    text = report(profile)
    assert "  2,000 FLOPs in " in text
    assert shows(text, "modules'", "passes 560", "recomputed 320", "else 1,120")
    assert shows(text, "depth 1", "Sequential 640")
    assert shows(report(profile, top=2), "depth 1", "Sequential 640", "Linear 240")
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("second Linear")]
    assert row[2:7] == ["24", "1", "240", "0", "27.3"]
    assert "0 Linear" in text
    assert "0 Linear" not in report(profile, depth=1)
    assert "depth 2" not in report(profile, depth=1)
    assert "second Linear" not in report(profile, is_detailed=False)


def test_patterns_of_flexattention_are_counted_by_the_reference_and_used_again_after_it():
    def pattern():
        return LocalPattern(block=2, blocks_before=1)

    core = FlexCore(is_compiled=False, pattern=pattern)
    query, key, value = torch.randn(3, 6, 2, 3, 4).unbind()
    with (
        dense_attention(nn.Sequential(core)),
        count_flops(core, **COUNTED) as profile,
    ):
        context = core(query, key, value)
    assert torch.equal(context, DenseCore(pattern=pattern)(query, key, value))
    assert profile.forward == 2 * 2 * 2 * 3 * 6 * 6 * 4
    assert not core.is_dense
