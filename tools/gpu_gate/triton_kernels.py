"""Compile the Triton kernels that Inductor generates to machine code, without the GPU they are for."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult

from gpu_gate.cache import Cache, digest
from gpu_gate.cubins import Kernel, examine

__all__ = ["compile_kernel"]


def compile_kernel(name: str, source: str, gpu: str, cache: Cache) -> Kernel:
    """Compile one kernel with the first configuration that Inductor would try.

    Args:
        name: of the kernel in its source.
        source: a module that Inductor generated inside `gpu_gate.device.standing_in(gpu)`.
        gpu: the architecture, such as sm_90.
        cache: of results.
    """
    versions = f"{gpu} {torch.__version__} {triton.__version__}"
    stored = cache.get(
        digest(source.encode(), versions.encode()), lambda folder: _compile(name, source, folder)
    )
    accesses = {int(width): count for width, count in stored["accesses"].items()}
    return Kernel(stored["registers"], stored["shared"], stored["spilled"], accesses)


def _compile(name: str, source: str, folder: Path) -> dict[str, Any]:
    tuned = getattr(PyCodeCache.load(source), name)
    tuned.configs = tuned.configs[:1]
    # The static launcher loads the kernel into the driver.
    with mock.patch.object(StaticTritonCompileResult, "can_statically_launch", return_value=None):
        tuned.precompile(warm_cache_only=True)
    [compiled] = tuned.compile_results
    cubin = folder / f"{name}.cubin"
    cubin.write_bytes(compiled.kernel.asm["cubin"])
    [kernel] = examine(cubin).values()
    # Triton takes its shared memory at launch, so the machine code does not state it.
    kernel.shared = compiled.kernel.metadata.shared
    return {
        "registers": kernel.registers,
        "shared": kernel.shared,
        "spilled": kernel.spilled,
        "accesses": kernel.accesses,
    }
