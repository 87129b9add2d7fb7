"""Find the programs required for compilation; report missing ones."""

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from neox_kernels.errors import KernelBuildError

__all__ = ["Toolchain", "find_nvccs", "find_toolchain"]

OLDEST_CUDA = (11, 8)
_INSTALLED = Path("/usr/local")


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


def _cuda_folder() -> str | None:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def find_nvccs() -> list[Path]:
    """Return CUDA's compilers in order: of CUDA_HOME or CUDA_PATH, PATH, and /usr/local/cuda*.

    If one of the variables is set to a folder without a compiler, there is none.
    """
    folder = _cuda_folder()
    found = [Path(folder) / "bin" / "nvcc"] if folder else []
    if found and not found[0].is_file():
        return []
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += [_INSTALLED / "cuda" / "bin", *sorted(_INSTALLED.glob("cuda-*/bin"), reverse=True)]
    found += [path for folder in folders if os.access(path := folder / "nvcc", os.X_OK) and path.is_file()]
    first_of: dict[Path, Path] = {}
    for path in found:
        first_of.setdefault(path.resolve(), path)
    return list(first_of.values())


def _output(*command: str | Path) -> str:
    try:
        return subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(f"cannot run {command[0]} ({error}); reinstall it") from error


def _find_host_compiler() -> Path:
    wanted = os.environ.get("CXX", "")
    for name in (wanted, "g++", "c++"):
        if name and (found := shutil.which(name)):
            return Path(found)
    raise KernelBuildError(
        "compiling the fused operators requires a C++ compiler, and none was found (CXX, g++ and c++ on "
        "PATH); install one, for example: apt-get install g++",
        code="no-compiler",
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


@dataclass(frozen=True, slots=True)
class _Compiler:
    nvcc: Path
    description: str
    version: tuple[int, int]

    @property
    def release(self) -> str:
        return "{}.{}".format(*self.version)


def _compiler(nvcc: Path) -> _Compiler:
    text = _output(nvcc, "--version")
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found is None:
        raise KernelBuildError(f"{nvcc} --version prints no release; check that it is CUDA's compiler")
    return _Compiler(nvcc, text, (int(found[1]), int(found[2])))


def _choose_compiler(cuda: str | None) -> _Compiler:
    """Return the first compiler, or the first of the same major version of CUDA."""
    nvccs = find_nvccs()
    if not nvccs:
        where = f" in {folder}" if (folder := _cuda_folder()) else ""
        raise KernelBuildError(
            f"compiling the fused operators requires CUDA's compiler nvcc, which was not found{where}; "
            "install the CUDA toolkit and add its bin folder to PATH or set CUDA_HOME",
            code="no-nvcc",
        )
    if cuda is None:
        return _compiler(nvccs[0])
    compilers = [_compiler(nvcc) for nvcc in nvccs]
    major = int(cuda.partition(".")[0])
    for compiler in compilers:
        if compiler.version[0] == major:
            return compiler
    others = ", ".join(f"{compiler.release} ({compiler.nvcc})" for compiler in compilers)
    raise KernelBuildError(
        f"this PyTorch is built for CUDA {cuda}, and no toolkit of CUDA {major} was found, only {others}; "
        "install one (a driver that runs this PyTorch runs what it compiles) and set CUDA_HOME to it"
    )


def find_toolchain(cuda: str | None = None) -> Toolchain:
    """Find the programs that a build uses.

    Args:
        cuda: version of CUDA that PyTorch is built for, such as "12.8": the toolkit has the same major
            version, so that a driver that runs PyTorch runs the build. None: the first toolkit found.

    Raises:
        KernelBuildError: a program is missing or too old, or no toolkit has this major version.
    """
    compiler = _choose_compiler(cuda)
    nvcc = compiler.nvcc
    if compiler.version < OLDEST_CUDA:
        raise KernelBuildError(
            f"{nvcc} belongs to CUDA {compiler.release}; the fused operators require 11.8 or newer; "
            "install a newer toolkit and set CUDA_HOME to it"
        )
    # The package `ninja` installs its program in the environment's scripts folder, which may not be on PATH.
    ninja = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if ninja is None:
        raise KernelBuildError("compiling the fused operators requires ninja; install it: pip install ninja")
    host_compiler = _find_host_compiler()
    includes = _include_folders()
    return Toolchain(
        nvcc=nvcc,
        cuda_version=compiler.release,
        known_architectures=tuple(_output(nvcc, "--list-gpu-code").split()),
        host_compiler=host_compiler,
        ninja=Path(ninja),
        include_folders=includes,
        identity="\n".join((compiler.description, _output(host_compiler, "--version"), *map(str, includes))),
    )
