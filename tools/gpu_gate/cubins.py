"""What the GPU's machine code says: registers, spills, shared memory and the widths of loads and stores.

The programs are those of the environment of `make gpu-gate`: nvcc of the package nvidia-cuda-nvcc, cuobjdump
and nvdisasm of Triton's wheel. None of them uses a GPU.
"""

import re
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_gate import operators
from gpu_gate.cache import Cache, digest
from neox_kernels.build import NVCC_FLAGS, SOURCES

__all__ = ["Kernel", "compile_source", "examine", "kernel_sources", "summarize"]

_PACKAGES = Path(sysconfig.get_path("purelib"))
_NVCC = _PACKAGES / "nvidia/cu13/bin/nvcc"
_TRITON_PROGRAMS = _PACKAGES / "triton/backends/nvidia/bin"
# -v: registers and spills of every kernel, on the error stream.
_FLAGS = (*NVCC_FLAGS, "-cubin", "-Xptxas", "-v")

_FUNCTION = re.compile(r"^\s*Function(?: :)? (?P<name>\w+)", re.MULTILINE)
_USE = re.compile(r"Function (?P<name>\w+):\s*REG:(?P<registers>\d+) STACK:\d+ SHARED:(?P<shared>\d+)")
_SPILLS = re.compile(
    r"Function properties for (?P<name>\w+)\s+\d+ bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
# LDG and STG access the GPU's memory, LDL and STL the stack, which holds spilled registers.
_ACCESS = re.compile(r"\s(?P<kind>LDG|STG|LDL|STL)(?P<modifiers>(?:\.\w+)*)\s")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "256": 32}


@dataclass
class Kernel:
    """What one kernel uses.

    Attributes:
        registers: of a thread.
        shared: bytes of shared memory whose size is known at compilation.
        spilled: bytes of instructions that store registers to the stack.
        accesses: instructions that load from or store to the GPU's memory, by bytes per thread.
        code: its instructions as text.
    """

    registers: int
    shared: int
    spilled: int = 0
    accesses: dict[int, int] = field(default_factory=dict)
    code: str = ""


def examine(cubin: Path) -> dict[str, Kernel]:
    """Return the kernels of a file of machine code by their names in it."""
    uses = _output(_TRITON_PROGRAMS / "cuobjdump", "-res-usage", str(cubin))
    kernels = {
        found["name"]: Kernel(int(found["registers"]), int(found["shared"])) for found in _USE.finditer(uses)
    }
    code = _output(_TRITON_PROGRAMS / "cuobjdump", "-sass", str(cubin))
    _, *parts = _FUNCTION.split(code)
    for name, instructions in zip(parts[::2], parts[1::2], strict=True):
        kernels[name].code = instructions
        for found in _ACCESS.finditer(instructions):
            _count(kernels[name], found["kind"], _width(found["modifiers"]))
    return kernels


def _count(kernel: Kernel, kind: str, width: int) -> None:
    if kind == "STL":
        kernel.spilled += width
    elif kind != "LDL":
        kernel.accesses[width] = kernel.accesses.get(width, 0) + 1


def _width(modifiers: str) -> int:
    """Return the bytes that a thread moves with one instruction."""
    return next((_WIDTHS[word] for word in modifiers.split(".") if word in _WIDTHS), 4)


def summarize(kernels: Iterable[Kernel]) -> dict[str, int]:
    """Return the figures of several kernels together."""
    all_of_them = list(kernels)
    accesses = [item for kernel in all_of_them for item in kernel.accesses.items()]
    return {
        "kernels": len(all_of_them),
        "most registers": max((kernel.registers for kernel in all_of_them), default=0),
        "registers, summed": sum(kernel.registers for kernel in all_of_them),
        "bytes spilled": sum(kernel.spilled for kernel in all_of_them),
        "most shared bytes": max((kernel.shared for kernel in all_of_them), default=0),
        "accesses of 16 bytes": sum(count for width, count in accesses if width >= 16),
        "accesses of 8 bytes": sum(count for width, count in accesses if width == 8),
        "accesses of 4 bytes or fewer": sum(count for width, count in accesses if width <= 4),
    }


# Our CUDA sources -------------------------------------------------------------------------------------------


def kernel_sources() -> list[Path]:
    """Return the CUDA sources of neox-kernels."""
    return sorted(SOURCES.glob("*.cu"))


def compile_source(
    source: Path, gpu: str, cache: Cache, flags: Sequence[str] = ()
) -> dict[str, dict[str, int]]:
    """Compile a CUDA source for a GPU such as sm_90, and return the figures of its kernels.

    Those of all of them have the name of the file, others that of the operator.

    Args:
        source: the file.
        gpu: the architecture.
        cache: of results.
        flags: further ones of the compiler.

    Raises:
        RuntimeError: it does not compile; the message is the compiler's.
    """
    headers = sorted([*SOURCES.glob("*.cuh"), *SOURCES.glob("*.h")])
    texts = [path.read_bytes() for path in (source, *headers)]
    options = " ".join((*_FLAGS, *flags))
    texts.append(Path(operators.__file__).read_bytes())
    key = digest(*texts, *(text.encode() for text in (gpu, options, _output(_NVCC, "--version"))))
    return cache.get(key, lambda folder: _compile_source(source, gpu, flags, folder))


def _compile_source(source: Path, gpu: str, flags: Sequence[str], folder: Path) -> dict[str, dict[str, int]]:
    cubin = folder / f"{source.stem}.cubin"
    command = [str(_NVCC), *_FLAGS, *flags, f"-arch={gpu}", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile for {gpu}:\n{done.stderr.strip()[-4000:]}")
    kernels = examine(cubin)
    for found in _SPILLS.finditer(done.stderr):
        kernels[found["name"]].spilled = int(found["stores"])
    of_operators = operators.operator_figures(source.stem, kernels, gpu)
    return {source.name: summarize(kernels.values()), **of_operators}


def _output(program: Path, *arguments: str) -> str:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.name} {' '.join(arguments)} fails: {done.stderr.strip()[-2000:]}")
    return done.stdout
