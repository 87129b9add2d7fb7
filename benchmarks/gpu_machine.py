"""Describe the GPU, its libraries and the compiled kernels, and import what the other parts import.

python benchmarks/gpu_machine.py [--json FILE]
python benchmarks/gpu_machine.py --rehearse                      # without a GPU
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time

import torch
from gpu_rows import Rows, parse

PACKAGES = ("triton", "numpy", "deepspeed", "transformers")
ASKED = (
    "name",
    "driver_version",
    "power.limit",
    "power.default_limit",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "memory.total",
)


def ask_driver(rows: Rows) -> None:
    """Add what the driver reports of the card."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=15,
        )
    except (OSError, subprocess.SubprocessError) as error:
        rows.skip("nvidia-smi", f"{type(error).__name__}: {error}")
        return
    for number, line in enumerate(done.stdout.strip().splitlines()):
        for name, value in zip(ASKED, line.split(","), strict=True):
            rows.add(f"GPU {number}, {name}", value.strip())


def versions(rows: Rows) -> None:
    """Add the versions of what computes."""
    rows.add("Python", platform.python_version())
    rows.add("cores", len(os.sched_getaffinity(0)))
    rows.add("torch", str(torch.__version__), note=f"CUDA {torch.version.cuda}")
    if torch.cuda.is_available():
        rows.add("cuDNN", str(torch.backends.cudnn.version()))
        rows.add("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    for name in PACKAGES:
        try:
            rows.add(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            rows.skip(name, "it is not installed")


def main() -> int:
    options, _, rows = parse(__doc__)
    versions(rows)
    ask_driver(rows)
    began = time.monotonic()
    # The first import reads hundreds of files, which the other parts then find in memory.
    import neox_model.train.open_run  # noqa: F401
    from neox_kernels import native

    rows.add("import of the training program", time.monotonic() - began, "s")
    state = native.state(may_build=False)
    if state.ok:
        rows.add("fused operators", state.reason)
    elif options.rehearse:
        rows.skip("fused operators", state.reason)
    else:
        rows.fail("fused operators", state.reason)
    return 1 if rows.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
