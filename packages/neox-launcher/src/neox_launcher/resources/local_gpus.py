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
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in asked.stdout.splitlines() if line.strip().isdecimal()]
    return min(sizes) * 2**20 if asked.returncode == 0 and sizes else None


def _count_present() -> int:
    command = shutil.which("nvidia-smi")
    if command is not None:
        try:
            listed = subprocess.run(
                [command, "-L"], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return _count_in_folder()
        if listed.returncode == 0:
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return _count_in_folder()


def _count_in_folder() -> int:
    try:
        return sum(1 for _ in _DRIVER_FOLDER.iterdir())
    except OSError:
        return 0
