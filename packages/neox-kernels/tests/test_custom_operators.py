"""Custom operators in PyTorch: schemas, fake tensors, autograd, torch.compile without breaks."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neox_kernels import (
    KernelUnavailable,
    add_layer_norm,
    add_rms_norm,
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    choice,
    cross_entropy,
    layer_norm,
    native,
    rms_norm,
    rotary,
    rotary_,
    scaled_causal_softmax,
    scaled_masked_softmax,
    split_rotary,
    status,
)
from neox_kernels.operators import gated as gated_module
from support.refusals import refused
from support.tiers import slow_except

# rotary_ is the same in place, and apex's layer norm has no form for the CPU.
OPERATORS = [operator for operator in status.OPERATORS if operator.name not in ("rotary_", "apex_layer_norm")]
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
CPU = torch.device("cpu")


def raw_calls():
    """Return each custom operator with arguments, without the wrapper that checks them."""
    x, width = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    seed, rows = torch.tensor([7]), torch.rand(6)
    gate, cos = torch.randn(2, 3, 8, requires_grad=True), torch.rand(2, 2)
    query, key = torch.randn(2, 1, 3, 8, requires_grad=True), torch.randn(2, 1, 1, 8, requires_grad=True)
    return {
        "softmax_forward": (x, torch.rand(3, 8) < 0.5, 0.5, False),
        "softmax_backward": (x.detach(), x.detach(), 0.5, True),
        "bias_gelu_forward": (x, width, "tanh"),
        "bias_gelu_backward": (x.detach(), x.detach(), width.detach(), "erf"),
        "bias_dropout_add_forward": (x, width, gate, seed, 0.5),
        "bias_dropout_add_backward": (x.detach(), None, seed, 0.5),
        "gated_forward": (x, gate, width, None, "silu"),
        "gated_backward": (x.detach(), x.detach(), gate.detach(), None, width.detach(), "erf", True),
        "layer_norm_forward": (x, width, width.detach().clone().requires_grad_(), 1e-5),
        "add_layer_norm_forward": (x, gate, width, width.detach().clone().requires_grad_(), 1e-5),
        "layer_norm_backward": (x.detach(), None, x.detach(), width.detach(), torch.rand(12)),
        "rms_norm_forward": (x, width, 1e-5),
        "add_rms_norm_forward": (x, gate, width, 1e-5),
        "rms_norm_backward": (x.detach(), gate.detach(), x.detach(), width.detach(), rows),
        "rotary": (query, key, cos, cos, False),
        "rotary_": (query.detach(), key.detach(), cos, cos),
        "split_rotary_backward": (query.detach(), key.detach(), key.detach(), cos, cos, 1),
        "cross_entropy_": (torch.randn(6, 8), torch.tensor([0, 7, -1, 8, 2, 3]), rows, None, 7),
    }


@pytest.mark.parametrize("name", raw_calls())
def test_opcheck(name):
    overload = getattr(torch.ops.neox_kernels, name).default
    checks = ["test_schema", "test_faketensor"]
    if name.endswith("forward") or name == "rotary":
        checks += ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    outcome = torch.library.opcheck(overload, raw_calls()[name], test_utils=checks)
    assert set(outcome.values()) == {"SUCCESS"}


def test_all_custom_operators_are_checked():
    names = torch._C._dispatch_get_all_op_names()
    assert {
        name.removeprefix("neox_kernels::") for name in names if name.startswith("neox_kernels::")
    } == set(raw_calls())


@every_operator
def test_compiles_without_graph_breaks(operator):
    shape = (4, 2, 3, 8)
    make = operator.comparable_example or operator.example
    compiled = dataclasses.replace(
        operator, fused=torch.compile(operator.fused, backend="aot_eager", fullgraph=True)
    )
    assert choice.disagreement(compiled, make(shape, torch.float32, CPU)) is None


def test_in_place_rotary_compiles_without_graph_breaks():
    args = rotary_.example((4, 2, 3, 8), torch.float32, CPU)
    expected = rotary.reference(*args)
    compiled = torch.compile(rotary_.fused, backend="aot_eager", fullgraph=True)
    for result, value in zip(compiled(*args), expected, strict=True):
        torch.testing.assert_close(result, value)


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 7, 64, 129])
def test_cuda_code_agrees_with_the_reference_forward_and_backward(operator, width, dtype, emulated):
    make = operator.comparable_example or operator.example
    torch.manual_seed(0)
    assert choice.disagreement(operator, make((5, 2, 3, width), dtype, CPU)) is None


# Rows of one warp, of several warps with two and four vectors each, and rows too long for registers.
@every_operator
@pytest.mark.parametrize("width", slow_except([512, 1024, 4096 + 512, 8192 + 8, 2050], 512, 2050))
def test_cuda_code_agrees_for_all_row_widths(operator, width, emulated):
    make = operator.comparable_example or operator.example
    shape = (2, 1, 2, width) if operator is not rotary else (2, 1, 1, width)
    assert choice.disagreement(operator, make(shape, torch.float32, CPU)) is None


# Backward of norms: 16, 32 and 64 columns of a thread; sums in shared memory, registers and scratch memory.
@pytest.mark.parametrize(
    "operator", [layer_norm, rms_norm, add_layer_norm, add_rms_norm], ids=lambda operator: operator.name
)
@pytest.mark.parametrize("of_parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", slow_except([520, 4096 + 8, 8192 + 8, 16384, 16384 + 8, 4097], 520))
def test_cuda_code_of_norms_agrees_for_several_rows_of_a_block(operator, of_parameters, width, emulated):
    arguments = operator.example((7, width), torch.bfloat16, CPU)
    in_their_type = (
        each.detach().to(of_parameters).requires_grad_() if each.ndim == 1 else each for each in arguments
    )
    assert choice.disagreement(operator, tuple(in_their_type)) is None


@every_operator
def test_cuda_code_accepts_zero_rows(operator, emulated):
    make = operator.comparable_example or operator.example
    assert choice.disagreement(operator, make((0, 2, 3, 8), torch.float32, CPU)) is None


@pytest.mark.parametrize(
    "operator",
    [operator for operator in OPERATORS if operator not in (cross_entropy, split_rotary)],
    ids=lambda operator: operator.name,
)
def test_cuda_code_accepts_non_contiguous_inputs(operator, emulated):
    make = operator.comparable_example or operator.example
    shape = (4, 3, 5, 8)

    def scattered(arg):
        if isinstance(arg, torch.Tensor) and arg.shape == shape:
            return arg.detach().permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0).requires_grad_()
        return arg

    args = tuple(scattered(arg) for arg in make(shape, torch.float32, CPU))
    assert not args[0].is_contiguous()
    assert choice.disagreement(operator, args) is None


@pytest.mark.parametrize("offset", [1, 4])
def test_cuda_code_accepts_unaligned_addresses(offset, emulated):
    storage = torch.randn(offset + 6 * 64)
    x = storage[offset:].view(6, 64).requires_grad_()
    width = torch.randn(64, requires_grad=True)
    for operator, args in [
        (scaled_causal_softmax, (x, 0.3)),
        (bias_gelu, (x, width)),
        (layer_norm, (x, width, width.detach().clone().requires_grad_())),
        (rms_norm, (x, width)),
        (add_layer_norm, (x, x, width, width.detach().clone().requires_grad_())),
        (add_rms_norm, (torch.randn(6, 64), x, width)),
        (bias_dropout_add, (x, width, x, 0.0)),
        (bias_swiglu, (x, x, width, width)),
    ]:
        assert choice.disagreement(operator, args) is None, operator.name


@pytest.mark.parametrize("mask_shape", [(4, 3, 5, 16), (4, 1, 1, 16), (1, 3, 5, 16), (5, 16), (5, 1), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_code_reads_masks_of_every_shape(mask_shape, dtype, emulated):
    scores = torch.randn(4, 3, 5, 16, dtype=dtype, requires_grad=True)
    assert choice.disagreement(scaled_masked_softmax, (scores, torch.rand(mask_shape) < 0.5, 0.3)) is None


def test_non_boolean_masks_are_refused():
    with refused(TypeError, "must be boolean"):
        scaled_masked_softmax.fused(torch.zeros(2, 2), torch.zeros(2, 2), 1.0)


def test_activation_codes_match_the_sources():
    assert gated_module.ACTIVATION_CODES == {"silu": 0, "tanh": 1, "erf": 2}


@pytest.mark.slow
def test_cuda_code_accesses_only_its_memory(emulated_module_path):
    """Every tensor ends at an inaccessible page; runs in a separate process."""
    script = Path(__file__).parent / "emulator" / "guarded.py"
    done = subprocess.run(
        [sys.executable, script, emulated_module_path], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (
        f"exit code {done.returncode} (-11: outside its memory)\n{done.stderr[-2000:]}"
    )
    assert sorted(done.stdout.split()) == sorted(operator.name for operator in OPERATORS)


def test_cuda_code_is_independent_of_thread_order(emulated, monkeypatch):
    monkeypatch.setenv("NEOX_EMULATOR_REVERSE", "1")
    for operator in OPERATORS:
        make = operator.comparable_example or operator.example
        for shape in [(3, 1, 2, 72), (2, 1, 1, 1032)]:
            assert choice.disagreement(operator, make(shape, torch.float32, CPU)) is None, operator.name


def test_tensors_on_two_devices_are_refused():
    with refused(ValueError, "cpu and meta"):
        native.compiled_for(torch.zeros(2), None, torch.zeros(2, device="meta"))


def test_unsupported_dtypes_are_refused(emulated):
    with refused(KernelUnavailable, "float16, bfloat16", "float32", "torch.float64"):
        bias_gelu.fused(torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4))
    with refused(KernelUnavailable, "float32", "torch.float64"):
        bias_gelu.fused(torch.zeros(2, 4), torch.zeros(4, dtype=torch.float64))
