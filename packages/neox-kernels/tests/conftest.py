"""Three implementations of an operator: reference, custom operator on the CPU, emulated CUDA code."""

import hashlib
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from neox_kernels import native

FORMS = ("reference", "custom", "emulated")
EMULATOR = Path(__file__).parent / "emulator"
SOURCES = Path(native.__file__).parent / "csrc"


def pytest_collection_modifyitems(items):
    """Remove combinations of emulated CUDA code with float64, which it does not support."""
    parameters = [getattr(item, "callspec", None) and item.callspec.params for item in items]
    items[:] = [
        item
        for item, given in zip(items, parameters, strict=True)
        if not (given and given.get("form") == "emulated" and given.get("dtype") == torch.float64)
    ]


def _compile_emulator(folder: Path) -> Path:
    import pybind11

    module = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if (folder / "compiled").exists():
        return module
    includes = f"-I{EMULATOR} -I{pybind11.get_include()} -I{sysconfig.get_path('include')}"
    flags = (
        f"-std=c++17 -O0 -fno-strict-aliasing -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas {includes}"
    )
    sources = sorted([*SOURCES.glob("*.cu"), SOURCES / "bindings.cpp"])
    rules = [f"rule cxx\n  command = g++ {flags} -x c++ -c $in -o $out"]
    rules += [f"build {source.name}.o: cxx {source}" for source in sources]
    rules += ["rule link\n  command = g++ -shared $in -o $out"]
    rules += [f"build {module.name}: link {' '.join(f'{source.name}.o' for source in sources)}"]
    (folder / "build.ninja").write_text("\n".join(rules) + "\n")
    done = subprocess.run(["ninja", "-C", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    (folder / "compiled").touch()
    return module


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(1234)


@pytest.fixture(scope="session")
def emulated_module_path(request):
    """Compile csrc with g++ and the emulator of CUDA; repeat when a source changes."""
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("compiling the CUDA code for the CPU needs g++ and ninja")
    files = [*sorted(SOURCES.iterdir()), *sorted(EMULATOR.iterdir())]
    content = b"".join(path.read_bytes() for path in files)
    folder = request.config.cache.mkdir(f"emulator-{hashlib.sha256(content).hexdigest()[:16]}")
    # Processes that run tests in parallel share the folder.
    with FileLock(folder / "lock"):
        return _compile_emulator(folder)


@pytest.fixture(scope="session")
def emulated_module(emulated_module_path):
    spec = importlib.util.spec_from_file_location("emulated._native", emulated_module_path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Return a function that selects one implementation: `form(operator)(arguments)`."""
    if request.param == "emulated":
        module = request.getfixturevalue("emulated_module")
        monkeypatch.setattr(native, "compiled_for", lambda *tensors: module)
    return lambda operator: operator.reference if request.param == "reference" else operator.fused


@pytest.fixture
def emulated(monkeypatch, emulated_module):
    """Run forward and backward of custom operators with the emulated CUDA code."""
    monkeypatch.setattr(native, "compiled_for", lambda *tensors: emulated_module)
