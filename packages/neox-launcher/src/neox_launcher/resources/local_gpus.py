"""Counts the GPUs of this host without importing torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["count_gpus", "smallest_gpu_memory"]

_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_PATIENCE_SECONDS = 10


def count_gpus(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of GPUs that are visible to a process started on this host.

    Counts the entries of `CUDA_VISIBLE_DEVICES` if it is set (up to its first -1, as CUDA does), else the
    GPUs listed by `nvidia-smi`, else those in the folder of the driver.

    Args:
        environment: used instead of the environment of this process.
    """
    env = os.environ if environment is None else environment
    present = _count_present()
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    chosen = []
    for name in visible.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        chosen.append(name.strip())
    return len(dict.fromkeys(chosen))


def smallest_gpu_memory() -> int | None:
    """Return the smallest GPU memory of this machine in bytes, or None if `nvidia-smi` fails."""
    listed = _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits") or ()
    sizes = [int(line) for line in listed if line.strip().isdecimal()]
    return min(sizes) * 2**20 if sizes else None


def _nvidia_smi(*options: str) -> list[str] | None:
    """Return the lines that `nvidia-smi` prints with options, or None if it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        asked = subprocess.run(
            [command, *options], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.splitlines() if asked.returncode == 0 else None


def _count_present() -> int:
    listed = _nvidia_smi("-L")
    if listed is not None:
        return sum(line.startswith("GPU ") for line in listed)
    try:
        return sum(1 for _ in _DRIVER_FOLDER.iterdir())
    except OSError:
        return 0
