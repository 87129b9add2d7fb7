"""Find the programs required for compilation; report missing ones."""

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from neox_kernels.errors import KernelBuildError

__all__ = ["Toolchain", "find_nvcc", "find_toolchain"]

OLDEST_CUDA = (11, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Programs, include folders, and a string that identifies their versions."""

    nvcc: Path
    cuda_version: str
    known_architectures: tuple[str, ...]
    host_compiler: Path
    ninja: Path
    include_folders: tuple[Path, ...]
    identity: str


def find_nvcc() -> Path | None:
    """Find CUDA's compiler: in CUDA_HOME or CUDA_PATH if set, else on PATH, else in /usr/local/cuda."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            nvcc = Path(folder) / "bin" / "nvcc"
            return nvcc if nvcc.is_file() else None
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return None if found is None else Path(found)


def _output(*command: str | Path) -> str:
    try:
        return subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(f"cannot run {command[0]} ({error}); reinstall it") from error


def _find_ninja() -> Path:
    # The package `ninja` installs its program in the environment's scripts folder, which may not be on PATH.
    found = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if found is None:
        raise KernelBuildError("compiling the fused operators requires ninja; install it: pip install ninja")
    return Path(found)


def _find_host_compiler() -> Path:
    wanted = os.environ.get("CXX", "")
    for name in (wanted, "g++", "c++"):
        if name and (found := shutil.which(name)):
            return Path(found)
    raise KernelBuildError(
        "compiling the fused operators requires a C++ compiler, and none was found (CXX, g++ and c++ on "
        "PATH); install one, for example: apt-get install g++"
    )


def _include_folders() -> tuple[Path, ...]:
    try:
        import pybind11
    except ImportError as error:
        raise KernelBuildError(
            "compiling the fused operators requires pybind11; install it: pip install pybind11"
        ) from error
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        raise KernelBuildError(
            f"compiling the fused operators requires Python's headers, and {python} has no Python.h; "
            "install them, for example: apt-get install python3-dev"
        )
    return Path(pybind11.get_include()), python


def find_toolchain() -> Toolchain:
    """Find the programs that a build uses.

    Raises:
        KernelBuildError: a program is missing or too old.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        where = next(
            (f" ({name} is {os.environ[name]})" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ),
            "",
        )
        raise KernelBuildError(
            f"compiling the fused operators requires CUDA's compiler nvcc, which was not found{where}; "
            "install the CUDA toolkit and add its bin folder to PATH or set CUDA_HOME"
        )
    text = _output(nvcc, "--version")
    version = re.search(r"release (\d+)\.(\d+)", text)
    if version is None:
        raise KernelBuildError(f"{nvcc} --version prints no release; check that it is CUDA's compiler")
    if (int(version[1]), int(version[2])) < OLDEST_CUDA:
        raise KernelBuildError(
            f"{nvcc} belongs to CUDA {version[1]}.{version[2]}; the fused operators require 11.8 or newer; "
            "install a newer toolkit and set CUDA_HOME to it"
        )
    host_compiler = _find_host_compiler()
    includes = _include_folders()
    return Toolchain(
        nvcc=nvcc,
        cuda_version=f"{version[1]}.{version[2]}",
        known_architectures=tuple(_output(nvcc, "--list-gpu-code").split()),
        host_compiler=host_compiler,
        ninja=_find_ninja(),
        include_folders=includes,
        identity="\n".join((text, _output(host_compiler, "--version"), *map(str, includes))),
    )
