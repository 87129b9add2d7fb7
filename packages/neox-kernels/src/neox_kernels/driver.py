"""Whether the machine's NVIDIA driver and GPU run a build: the driver's version, and one launch on trial.

A program compiled by a toolkit of CUDA 12.y runs on every driver for CUDA 12, one by 13.y on those for 13:
the runtime is compatible within a major version. NVIDIA's packages for forward compatibility (cuda-compat)
let an older driver run a newer major version.

Source: NVIDIA's CUDA Toolkit release notes, table of toolkits and drivers, Linux x86_64.
"""

import ctypes
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from neox_kernels.build import Built

__all__ = ["driver_version", "why_driver_too_old", "why_launch_fails"]

# major version of CUDA -> oldest driver
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 0)}

_VERSION_FILE = Path("/proc/driver/nvidia/version")
_TRIAL_LAUNCH = Path(__file__).parent / "trial_launch.py"
_TRIAL_SECONDS = 120.0
_BUSY = "busy or unavailable"


@functools.cache
def driver_version() -> tuple[int, ...] | None:
    """Return the version of the loaded NVIDIA driver, such as (580, 65, 6); None if it is unknown."""
    try:
        found = re.search(r"\s(\d{3,}(?:\.\d+)+)\s", _VERSION_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else tuple(map(int, found[1].split(".")))


@functools.cache
def newest_cuda() -> int | None:
    """Return the newest major version of CUDA that the driver's library supports; None if it is not found."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else version.value // 1000


def why_driver_too_old(built: Built) -> str | None:
    """Return why the driver cannot run a build, with the remedy; None if it can, or if it is unknown."""
    toolkit, driver = re.search(r"(\d+)\.\d+", built.compiler), driver_version()
    if toolkit is None or driver is None:
        return None
    major, supported = int(toolkit[1]), newest_cuda()
    oldest = OLDEST_DRIVER.get(major)
    if oldest is None or driver >= oldest or (supported is not None and supported >= major):
        return None
    return (
        f"the fused operators were compiled by {built.compiler}, which requires NVIDIA driver "
        f"{oldest[0]}.{oldest[1]:02} or newer, and this machine has {'.'.join(map(str, driver))}; update the "
        "driver, or set CUDA_HOME to a toolkit of an older CUDA and run: neox-kernels build"
    )


def why_launch_fails(built: Built, device: str, gpu: str) -> str | None:
    """Launch one operator of a build in a separate process; return why it failed, None if it did not.

    A failed launch can make CUDA unusable for a process. A success is remembered in the folder of the build.

    Args:
        built: the build.
        device: torch's name of the device, such as "cuda:0".
        gpu: the GPU's name; the trial is made once for each and for each driver.
    """
    parts = [str(built.module), built.module.stat().st_mtime_ns, gpu, driver_version()]
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
        problem = None if done.returncode == 0 else _last_line(done)
    except subprocess.TimeoutExpired:
        problem = f"it did not end within {_TRIAL_SECONDS:.0f} s"
    if problem is not None and _BUSY in problem:
        # In the exclusive compute mode, the device belongs to this process.
        return None
    if problem is None:
        with suppress(OSError):  # A wheel's folder may be read-only: the trial is repeated.
            passed.touch()
        return None
    return (
        f"a trial launch on {gpu} failed ({problem}); delete {built.folder} and run: neox-kernels build; if "
        "it fails again, check the GPU with nvidia-smi"
    )


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
