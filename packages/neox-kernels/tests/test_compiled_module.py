"""The compiled module: its type stub, and compilation by nvcc if present."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neox_kernels import build, toolchain
from support.refusals import refused

STUB = Path(build.__file__).parent / "_native.pyi"


def functions_of_stub():
    tree = ast.parse(STUB.read_text())
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def test_stub_lists_every_function_and_argument(emulated_module):
    found = {}
    for name in dir(emulated_module):
        function = getattr(emulated_module, name)
        if callable(function):
            signature = function.__doc__.splitlines()[0]
            found[name] = re.findall(r"(\w+): ", signature.split(") ->")[0])
    assert found == functions_of_stub()


# Calls that are right, with addresses that nothing may touch: a call that is not refused ends the process.
SOFTMAX = {
    "device": 0, "stream": 0, "dtype": 1, "gradient": 16, "probabilities": 16, "result": 16, "lead": 1,
    "queries": 1, "keys": 8, "scale": 1.0, "causal": False,
}  # fmt: skip
MASKED = {
    "device": 0, "stream": 0, "dtype": 1, "scores": 16, "masked_out": 16, "mask_inner": 1,
    "mask_strides": (0, 0, 0, 1), "probabilities": 16, "lead": 1, "queries": 1, "keys": 8, "scale": 1.0,
    "causal": False,
}  # fmt: skip
GELU = {
    "device": 0, "stream": 0, "dtype": 0, "gradient": 16, "x": 16, "bias": (16, 0), "x_gradient": 16,
    "bias_gradient": (16, 0), "partials": 16, "partial_rows": 1, "rows": 1, "columns": 8, "tanh_form": True,
}  # fmt: skip
DROPOUT = {
    "device": 0, "stream": 0, "dtype": 0, "x": 16, "bias": (0, 0), "residual": 16, "seed": 16, "result": 16,
    "rows": 1, "columns": 8, "keep_below": 100, "keep_scale": 1.0,
}  # fmt: skip
GATED = {
    "device": 0, "stream": 0, "dtype": 2, "activation": 0, "up": 16, "up_stride": 8, "gate": 16,
    "gate_stride": 8, "up_bias": (0, 0), "gate_bias": (0, 0), "result": 16, "rows": 2, "columns": 8,
}  # fmt: skip
HEADS = (16, (8, 8, 8), 16, (8, 8, 8), 1)
ROTARY = {
    "device": 0, "stream": 0, "dtype": 1, "query": HEADS, "key": HEADS, "cos": 16, "sin": 16, "sequence": 1,
    "batch": 1, "width": 8, "pairs": 2, "inverse": False,
}  # fmt: skip
NORM = {
    "device": 0, "stream": 0, "dtype": 1, "x": 16, "residual": 0, "weight": (16, 0), "bias": (16, 0),
    "sum": 0, "result": 16, "mean": 16, "inverse_deviation": 16, "rows": 1, "columns": 8, "epsilon": 1e-5,
}  # fmt: skip
LOSS = {
    "device": 0, "stream": 0, "dtype": 0, "logits": 16, "labels": 16, "weights": 16, "given_log_totals": 0,
    "log_totals": 16, "picked": 16, "rows": 1, "columns": 8, "width": 8,
}  # fmt: skip
WRONG = [
    ("softmax_backward", SOFTMAX, {"dtype": 9}, "unknown dtype code 9"),
    ("softmax_backward", SOFTMAX, {"device": -1}, "device is -1"),
    ("softmax_backward", SOFTMAX, {"keys": -8}, "a size is -8"),
    ("softmax_backward", SOFTMAX, {"lead": 2**40, "queries": 2**40}, "exceed what a device holds"),
    ("softmax_backward", SOFTMAX, {"result": 0}, "result has no address"),
    ("softmax_backward", SOFTMAX, {"gradient": 17}, "gradient is not aligned to its elements of 2 bytes"),
    ("softmax_forward", MASKED, {"causal": True}, "exclude each other"),
    ("softmax_forward", MASKED, {"mask_inner": 0}, "mask_inner does not divide"),
    ("softmax_forward", MASKED, {"mask_strides": (0, 0, -1, 1)}, "stride of the mask is negative"),
    ("bias_gelu_backward", GELU, {"bias": (0, 0)}, "bias has no address"),
    ("bias_gelu_backward", GELU, {"bias": (16, 7)}, "unknown dtype code 7"),
    ("bias_gelu_backward", GELU, {"partials": 0}, "partials has no address"),
    ("bias_gelu_backward", GELU, {"partial_rows": 0}, "partial_rows is 0"),
    ("bias_dropout_add_forward", DROPOUT, {"seed": 0}, "seed has no address"),
    ("bias_dropout_add_forward", DROPOUT, {"seed": 12}, "seed is not aligned to its elements of 8 bytes"),
    ("bias_dropout_add_forward", DROPOUT, {"keep_below": 65537}, "keep_below is 65537"),
    ("bias_dropout_add_forward", DROPOUT, {"keep_scale": float("inf")}, "keep_scale is not finite"),
    ("gated_forward", GATED, {"activation": 3}, "unknown activation code 3"),
    ("gated_forward", GATED, {"up_stride": 7}, "a row stride is 7"),
    ("rotary", ROTARY, {"pairs": 5}, "5 pairs do not fit into 8 channels"),
    ("rotary", ROTARY, {"key": (16, (8, -8, 8), 16, (8, 8, 8), 1)}, "a stride of key is negative"),
    ("rotary", ROTARY, {"cos": 2}, "cos is not aligned to its elements of 4 bytes"),
    ("layer_norm_forward", NORM, {"weight": (0, 0)}, "weight has no address"),
    ("layer_norm_forward", NORM, {"bias": (16, 1)}, "weight and bias must have the same type"),
    ("layer_norm_forward", NORM, {"residual": 16}, "a residual and its sum with x go together"),
    ("cross_entropy", LOSS, {"width": 9}, "width is 9, with 8 columns"),
    ("cross_entropy", LOSS, {"rows": 2**31}, "more than one launch can take"),
    ("cross_entropy", LOSS, {"labels": 4}, "labels is not aligned to its elements of 8 bytes"),
]


@pytest.mark.parametrize(("name", "right", "change", "problem"), WRONG)
def test_wrong_calls_are_refused_with_the_operator_s_name(name, right, change, problem, emulated_module):
    with refused(ValueError, name, problem):
        getattr(emulated_module, name)(**right | change)


@pytest.mark.parametrize("function", ["cudaLaunchKernelEx", "cudaGetLastError"])
def test_failed_launches_name_the_operator(function, emulated_module, monkeypatch):
    monkeypatch.setenv("NEOX_EMULATOR_FAIL", function)
    scores = torch.zeros(1, 8)
    call = SOFTMAX | dict.fromkeys(("gradient", "probabilities", "result"), scores.data_ptr()) | {"dtype": 0}
    with refused(RuntimeError, "softmax_backward: CUDA"):
        emulated_module.softmax_backward(**call)
    monkeypatch.delenv("NEOX_EMULATOR_FAIL")
    emulated_module.softmax_backward(**call)


def flags_of_a_fast_compilation(nvcc):
    """Return flags for code that is not run here; `make gpu-gate` compiles with the flags of users."""
    usage = subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=True).stdout
    return "-Ofc=max" if "--Ofast-compile" in usage else "-Xptxas -O0"


@pytest.mark.slow
def test_nvcc_compiles_all_for_sm_90_and_the_module_loads_without_torch_or_gpu(tmp_path, monkeypatch):
    nvccs = toolchain.find_nvccs()
    if not nvccs:
        pytest.skip("nvcc is not installed")
    monkeypatch.setenv("NEOX_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", flags_of_a_fast_compilation(nvccs[0]))
    built = build.build(("sm_90",), timeout_seconds=600)
    script = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_native", {str(built.module)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
try:
    answer = str(module.gated_partial_rows(0, 0, 0, 10, 10) > 0)
except RuntimeError as error:
    answer = str(error)
names = [name for name in dir(module) if not name.startswith("_")]
print(json.dumps([names, answer, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names, answer, has_torch = json.loads(done.stdout)
    assert set(names) == set(functions_of_stub())
    assert answer == "True" or answer.startswith("gated_partial_rows: CUDA: ")
    assert not has_torch
