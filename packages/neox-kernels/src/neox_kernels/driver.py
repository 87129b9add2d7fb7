"""Whether the machine's NVIDIA driver and GPU run a build: one launch on trial."""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from neox_kernels.build import Built

__all__ = ["why_launch_fails"]

_VERSION_FILE = Path("/proc/driver/nvidia/version")
_TRIAL_LAUNCH = Path(__file__).parent / "trial_launch.py"
_TRIAL_SECONDS = 120.0
_BUSY = "busy or unavailable"


def why_launch_fails(built: Built, device: str, gpu: str) -> str | None:
    """Launch one operator of a build in a separate process; return why it failed, None if it did not.

    A driver may be too old for the toolkit that compiled the build. A failed launch can make CUDA unusable
    for a process. A success is remembered in the folder of the build.

    Args:
        built: the build.
        device: torch's name of the device, such as "cuda:0".
        gpu: the GPU's name; the trial is made once for each and for each driver.
    """
    driver = None
    with suppress(OSError):
        driver = _VERSION_FILE.read_text(encoding="utf-8")
    parts = [str(built.module), built.module.stat().st_mtime_ns, gpu, driver]
    key = json.dumps(parts, allow_nan=False)
    passed = built.folder / f"launched-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if passed.exists():
        return None
    # -P: this folder has a module with the name of a standard one.
    command = [sys.executable, "-P", str(_TRIAL_LAUNCH), str(built.module), device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False, env=dict(os.environ)
        )
        last_line = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        problem = None if done.returncode == 0 else last_line
    except subprocess.TimeoutExpired:
        problem = f"it did not end within {_TRIAL_SECONDS:.0f} s"
    if problem is None:
        with suppress(OSError):  # A wheel's folder may be read-only: the trial is repeated.
            passed.touch()
    # In the exclusive compute mode, the device belongs to this process.
    if problem is None or _BUSY in problem:
        return None
    return (
        f"a trial launch on {gpu} failed ({problem}); delete {built.folder} and run: neox-kernels build; if "
        "it fails again, check the GPU and the version of its driver with nvidia-smi"
    )
