"""`make gpu-gate`: what the layers and kernels become on GPUs, without a GPU, compared with stored figures.

    PYTHONPATH=tests:tools python -m gpu_gate [--update] [--plant]

For each architecture and GPU, one layer's forward and backward pass is compiled by Inductor, and its Triton
kernels to machine code; so are the CUDA sources of neox-kernels. Figures that differ from
figures.json fail, with the values before and after. --update stores the new figures and writes
docs/reports/gpu-gate.md; --plant puts faults into a layer and a kernel, each of which must fail.
Exit code 0: all figures are those stored (--plant: every fault was found); 1: otherwise.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_gate.cache import Cache, digest
from gpu_gate.device import GPUS, load_stand_in, standing_in
from gpu_gate.figures import FIGURES_FILE, Cell, Figures, differences, page, read_figures
from neox_config.atomic import atomic_write

__all__ = ["main"]

logger = logging.getLogger("gpu-gate")

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".gpu-gate"
_REMEDY = (
    "%d figures differ from %s. If the change is intended, store the new figures and commit them: "
    "make gpu-gate UPDATE=1"
)
_MEASURING = (
    "cubins.py",
    "cuda.cpp",
    "device.py",
    "faults.py",
    "layers.py",
    "lowering.py",
    "triton_kernels.py",
)
# Faults are planted in one architecture, on one GPU.
_ARCHITECTURE, _GPU = "GPT-NeoX", "sm_90"


def _layer(architecture: str, gpu: str, fault: str | None = None) -> dict[str, int]:
    """Return the figures of a layer. Call it in a new process."""
    cache = Cache(CACHE)
    key = digest(_sources(), architecture.encode(), gpu.encode(), str(fault).encode())
    return cache.get(key, lambda folder: _measure_layer(architecture, gpu, fault, cache))


def _measure_layer(architecture: str, gpu: str, fault: str | None, cache: Cache) -> dict[str, int]:
    # torch looks for CUDA when it is imported: `load_stand_in` must come first.
    from gpu_gate.cubins import summarize
    from gpu_gate.faults import LAYER_FAULTS
    from gpu_gate.layers import ARCHITECTURES
    from gpu_gate.lowering import lower
    from gpu_gate.triton_kernels import compile_kernel

    with standing_in(GPUS[gpu]):
        lowered = lower(ARCHITECTURES[architecture], spoil=LAYER_FAULTS.get(fault or ""))
        kernels = [compile_kernel(name, source, gpu, cache) for source, name in lowered.kernels.items()]
    return lowered.figures | summarize(kernels)


def _source(source: Path, gpu: str, flags: Sequence[str] = ()) -> dict[str, dict[str, int]]:
    """Return the figures of a CUDA source and of the operators in it."""
    from gpu_gate.cubins import compile_source

    return compile_source(source, gpu, Cache(CACHE), flags=flags)


def _sources() -> bytes:
    """Return everything that the figures of a layer depend on."""
    packages = [ROOT / "packages/neox-model/src", ROOT / "packages/neox-launcher/src/neox_config"]
    files = [path for package in packages for path in package.rglob("*.py")]
    files += [Path(__file__).with_name(name) for name in _MEASURING]
    files += [ROOT / "tests/support/settings.py", ROOT / "constraints.txt"]
    return digest(*(path.read_bytes() for path in sorted(files))).encode()


def _measure_all() -> Figures:
    """Return all figures; each cell is computed in a new process, two at a time."""
    from gpu_gate.cubins import kernel_sources
    from gpu_gate.layers import ARCHITECTURES

    work: dict[Cell, Callable[[], dict[str, Any]]] = {}
    for gpu in GPUS:
        work |= {("layer", name, gpu): partial(_layer, name, gpu) for name in ARCHITECTURES}
        work |= {("source", path.name, gpu): partial(_source, path, gpu) for path in kernel_sources()}
    return _run(work)


def _cells(cell: Cell, result: dict[str, Any]) -> Figures:
    """Return the figures of a result: of a layer, or of a source and the operators in it."""
    kind, subject, gpu = cell
    if kind == "layer":
        return {cell: result}
    return {("source" if name == subject else "operator", name, gpu): found for name, found in result.items()}


def _run(work: dict[Cell, Callable[[], dict[str, Any]]]) -> Figures:
    # Forked, so that torch is imported once. A process for each cell, because torch keeps facts of the GPU.
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(cores, maxtasksperchild=1) as pool:
        running = {cell: pool.apply_async(compute) for cell, compute in work.items()}
        found: Figures = {}
        for cell, result in running.items():
            try:
                found |= _cells(cell, result.get())
            except Exception as error:
                error.add_note(f"while compiling {' '.join(cell)}")
                raise
            logger.info("%s", " ".join(cell))
    return found


# Planted faults ---------------------------------------------------------------------------------------------


def _plant() -> int:
    """Plant each fault, and return 0 if the stored figures reveal every one of them."""
    from gpu_gate.cubins import kernel_sources
    from gpu_gate.faults import LAYER_FAULTS, SPILLING_FLAGS

    stored = read_figures()
    planted: dict[str, tuple[Cell, Callable[[], dict[str, Any]]]] = {
        fault: (("layer", _ARCHITECTURE, _GPU), partial(_layer, _ARCHITECTURE, _GPU, fault))
        for fault in LAYER_FAULTS
    }
    source = kernel_sources()[0]
    planted["a spill"] = (("source", source.name, _GPU), partial(_source, source, _GPU, SPILLING_FLAGS))
    missed = 0
    for fault, (cell, compute) in planted.items():
        found = _run({cell: compute})
        wrong = differences({cell: stored[cell] for cell in found}, found)
        logger.info("%s: %s", fault, "found" if wrong else "NOT FOUND")
        for line in wrong:
            logger.info("  %s", line)
        missed += not wrong
    return 1 if missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="gpu-gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="store the figures and write the report")
    parser.add_argument("--plant", action="store_true", help="plant faults, each of which must be found")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    # Lowering stops before the code is run, an error to Inductor, which keeps its files and says so.
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
    load_stand_in(CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        return _plant() if options.plant else _gate(update=options.update)


def _gate(*, update: bool) -> int:
    """Measure, and store the figures or compare them with those stored."""
    found = _measure_all()
    if update:
        _store(found)
        return 0
    wrong = differences(read_figures(), found)
    for line in wrong:
        logger.error("%s", line)
    if wrong:
        logger.error(_REMEDY, len(wrong), FIGURES_FILE.relative_to(ROOT))
    return 1 if wrong else 0


def _store(found: Figures) -> None:
    # One cell per line.
    rows = (
        f"{json.dumps(' / '.join(cell))}: {json.dumps(figures, allow_nan=False)}"
        for cell, figures in sorted(found.items())
    )
    with atomic_write(FIGURES_FILE) as file:
        file.write("{\n" + ",\n".join(rows) + "\n}\n")
    with atomic_write(ROOT / "docs/reports/gpu-gate.md") as file:
        file.write(page(found))


if __name__ == "__main__":
    sys.exit(main())
