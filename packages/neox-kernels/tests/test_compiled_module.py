"""The compiled module: its type stub, and compilation by nvcc if present."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neox_kernels import build, toolchain

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


def test_unknown_codes_are_refused(emulated_module):
    with pytest.raises(ValueError, match="unknown dtype code 9"):
        emulated_module.softmax_backward(0, 0, 9, 16, 16, 16, 1, 1, 1, 1.0, False)


def test_parameters_of_two_types_are_refused(emulated_module):
    with pytest.raises(ValueError, match=r"weight and bias must have the same type"):
        emulated_module.layer_norm_forward(0, 0, 1, 16, (16, 0), (16, 1), 16, 16, 16, 1, 8, 1e-5)


@pytest.mark.slow
def test_nvcc_compiles_all_for_sm_90_and_the_module_loads_without_torch_or_gpu(tmp_path, monkeypatch):
    if toolchain.find_nvcc() is None:
        pytest.skip("nvcc is not installed")
    monkeypatch.setenv("NEOX_KERNELS_CACHE", str(tmp_path / "cache"))
    built = build.build(("sm_90",), timeout_seconds=600)
    script = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_native", {str(built.module)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
try:
    answer = str(module.partial_rows(0, 10, 10, 4) > 0)
except RuntimeError as error:
    answer = str(error)
names = [name for name in dir(module) if not name.startswith("_")]
print(json.dumps([names, answer, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names, answer, has_torch = json.loads(done.stdout)
    assert set(names) == set(functions_of_stub())
    assert answer == "True" or answer.startswith("CUDA: ")
    assert not has_torch
