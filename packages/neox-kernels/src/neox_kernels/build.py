"""Compiling the fused operators: once per machine and user, in a folder that nobody else can write.

One folder per build, named by the hash of the sources, the Python ABI, the architectures and the compilers:

    CACHE/SOURCES-ABI-ARCHITECTURES-COMPILERS/_native.so, build.json

made beside its place and renamed into it, under a lock that others wait for. A build that fails leaves its
reason for those who waited, so that eight ranks do not fail one after the other. The folder is
NEOX_KERNELS_CACHE, or neox-kernels in XDG_CACHE_HOME or ~/.cache. A wheel made with NEOX_KERNELS_PREBUILD=1
carries a build inside the package instead.

This module imports neither torch nor pybind11's module, so that a wheel can be built without torch.
"""

import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from neox_kernels.errors import KernelBuildError
from neox_kernels.locking import hold_lock
from neox_kernels.toolchain import Toolchain, find_toolchain

__all__ = ["Built", "build", "build_into", "cache_folder", "covers", "find_built", "load_module"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
DEFAULT_TIMEOUT_SECONDS = 900.0
NVCC_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden")
CXX_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A compiled module and what it was compiled from, by and for."""

    folder: Path
    architectures: tuple[str, ...]
    sources: str
    abi: str
    compiler: str

    @property
    def module(self) -> Path:
        """The module's file."""
        return self.folder / f"_native{_abi()}"

    @property
    def description(self) -> str:
        """One phrase for logs."""
        return f"compiled for {', '.join(self.architectures)} by {self.compiler}"


def _abi() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _short_hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def source_hash() -> str:
    """A hash of all that is compiled and of the flags it is compiled with."""
    files = [name.encode() + b"\0" + (SOURCES / name).read_bytes() for name in sorted(os.listdir(SOURCES))]
    return _short_hash(*files, " ".join(NVCC_FLAGS + CXX_FLAGS).encode())


def cache_folder() -> Path:
    """Where builds are kept; need not exist."""
    if folder := os.environ.get("NEOX_KERNELS_CACHE"):
        return Path(folder).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache").absolute() / "neox-kernels"


def _whose(path: Path) -> str | None:
    """Why nothing may be loaded from this path, or None: it must be this user's, and writable by no other."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if found.st_uid != os.getuid():
        return f"{path} belongs to user {found.st_uid}, not to {os.getuid()}"
    if found.st_mode & 0o022:
        return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _private(folder: Path) -> Path:
    """The folder, made with mode 0700 where it does not exist.

    Raises:
        KernelBuildError: it belongs to someone else or others can write into it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        problem = _whose(folder)
    except OSError as error:
        raise KernelBuildError(
            f"the folder for compiled operators cannot be made ({error}); name another in NEOX_KERNELS_CACHE"
        ) from error
    if problem is not None:
        raise KernelBuildError(
            f"nothing is compiled into or loaded from {folder}: {problem}; chmod it to 0700 or name another "
            "folder "
            "in NEOX_KERNELS_CACHE"
        )
    return folder


# Architectures ----------------------------------------------------------------------------------------------


def _number(architecture: str) -> int:
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", architecture)
    if found is None:
        raise KernelBuildError(
            f"{architecture!r} names no architecture; they are named like sm_80, sm_90, sm_90a"
        )
    return int(found[1])


def covers(compiled: Sequence[str], present: Sequence[str]) -> bool:
    """Whether a build for some architectures runs on GPUs of others.

    Machine code runs on the same major version from its own minor version on; that of an "a" architecture
    only on itself. The portable code that a build carries for its newest architecture runs on all later ones.
    """
    plain = {_number(name) for name in compiled if name[-1].isdigit()}
    newest = max(_number(name) for name in compiled)

    def runs(architecture: str) -> bool:
        number = _number(architecture)
        exact = number in {_number(name) for name in compiled}
        return exact or number > newest or any(p // 10 == number // 10 and p < number for p in plain)

    return all(runs(architecture) for architecture in present)


def _target_flags(architectures: Sequence[str]) -> list[str]:
    flags = [f"-gencode=arch=compute_{name[3:]},code={name}" for name in architectures]
    newest = max(_number(name) for name in architectures)
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def _checked_architectures(names: Sequence[str], toolchain: Toolchain) -> tuple[str, ...]:
    if not names:
        raise KernelBuildError(
            "no GPU is present and no architecture was named; name one with --arch, like sm_90"
        )
    known = toolchain.known_architectures
    for name in names:
        if f"sm_{_number(name)}" not in known:  # Suffixed names are not listed.
            raise KernelBuildError(
                f"the nvcc of CUDA {toolchain.cuda_version} cannot compile for {name}; it knows "
                f"{', '.join(known)}: install a CUDA toolkit that knows it and name it in CUDA_HOME"
            )
    return tuple(sorted(set(names), key=lambda name: (_number(name), name)))


# Finding and loading ----------------------------------------------------------------------------------------


def _read_built(folder: Path) -> Built | None:
    record = folder / "build.json"
    if not record.is_file():
        return None
    stored = json.loads(record.read_text(encoding="utf-8"))
    return Built(
        folder=folder,
        architectures=tuple(stored["architectures"]),
        sources=stored["sources"],
        abi=stored["abi"],
        compiler=stored["compiler"],
    )


def list_built() -> list[Built]:
    """The builds that fit these sources and this Python: the wheel's own first, then newest first."""
    found = [_read_built(PREBUILT)]
    cache = cache_folder()
    if cache.is_dir() and _whose(cache) is None:
        folders = sorted(cache.glob("*/build.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        found += [_read_built(path.parent) for path in folders]
    fits = [built for built in found if built and built.sources == source_hash() and built.abi == _abi()]
    return [built for built in fits if _is_safe(built)]


def _is_safe(built: Built) -> bool:
    if built.folder == PREBUILT:
        return True  # As safe as the package's own Python files.
    problem = _whose(built.folder) or _whose(built.module)
    if problem is not None:
        logger.warning("a compiled module is not loaded: %s", problem)
    return problem is None


def _present_compiler() -> str | None:
    try:
        return find_toolchain().identity
    except KernelBuildError:
        return None  # Nothing can be compiled here, so any build that fits will do.


def find_built(architectures: Sequence[str]) -> Built | None:
    """A build that runs on GPUs of these architectures, or None.

    Where there is a compiler, a build of another compiler is not taken from the cache.
    """
    compiler = _present_compiler()
    for built in list_built():
        same_compiler = (
            compiler is None
            or built.folder == PREBUILT
            or built.folder.name.endswith(_short_hash(compiler.encode()))
        )
        if same_compiler and covers(built.architectures, architectures):
            return built
    return None


@functools.cache
def load_module(path: Path) -> ModuleType:
    """Import a compiled module from its file."""
    spec = importlib.util.spec_from_file_location("neox_kernels._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Compiling --------------------------------------------------------------------------------------------------


def build(
    architectures: Sequence[str], *, jobs: int | None = None, timeout_seconds: float | None = None
) -> Built:
    """Compile for these architectures, unless that is done; wait where another process is doing it.

    Args:
        architectures: like ("sm_80", "sm_90a"); the newest also as portable code for later ones.
        jobs: compilers at the same time; None for what ninja finds right.
        timeout_seconds: for waiting and for compiling; None for NEOX_KERNELS_BUILD_TIMEOUT or 900.

    Raises:
        KernelBuildError: a compiler is missing or too old, or compiling failed or took too long.
    """
    if timeout_seconds is None:
        timeout_seconds = float(os.environ.get("NEOX_KERNELS_BUILD_TIMEOUT", DEFAULT_TIMEOUT_SECONDS))
    toolchain = find_toolchain()
    names = _checked_architectures(architectures, toolchain)
    cache = _private(cache_folder())
    compiler = _short_hash(toolchain.identity.encode())
    place = cache / f"{source_hash()}-{_short_hash(_abi().encode())[:4]}-{'-'.join(names)}-{compiler}"
    if (built := _read_built(place)) is not None and _is_safe(built):
        return built
    asked = time.time()
    purpose = f"compiling the fused operators for {', '.join(names)}"
    with hold_lock(place.with_suffix(".lock"), timeout_seconds=timeout_seconds, purpose=purpose):
        if (built := _read_built(place)) is not None and _is_safe(built):
            return built
        failure = place.with_suffix(".failed")
        if failure.exists() and failure.stat().st_mtime >= asked:
            raise KernelBuildError(failure.read_text(encoding="utf-8"))
        try:
            return _build_in_place(place, names, toolchain, jobs, timeout_seconds)
        except KernelBuildError as error:
            failure.write_text(str(error), encoding="utf-8")
            raise


def _build_in_place(
    place: Path,
    architectures: tuple[str, ...],
    toolchain: Toolchain,
    jobs: int | None,
    timeout_seconds: float,
) -> Built:
    prefix = f"building-{place.name}-"
    for left in place.parent.glob(f"{prefix}*"):  # By a builder that was killed: this process holds the lock.
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
    try:
        build_into(aside, architectures, toolchain, jobs=jobs, timeout_seconds=timeout_seconds)
        shutil.rmtree(place, ignore_errors=True)  # What was there was not safe to load.
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    built = _read_built(place)
    assert built is not None
    return built


def build_into(
    folder: Path,
    architectures: Sequence[str],
    toolchain: Toolchain,
    *,
    jobs: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Compile into an existing folder and leave only the module and its record there.

    Raises:
        KernelBuildError: compiling failed or took too long.
    """
    names = _checked_architectures(architectures, toolchain)
    work = folder / "work"
    shutil.copytree(SOURCES, work)
    module = f"_native{_abi()}"
    (work / "build.ninja").write_text(_ninja_file(work, module, names, toolchain), encoding="utf-8")
    start = time.monotonic()
    logger.info("compiling the fused operators for %s with %s", ", ".join(names), toolchain.nvcc)
    command = [str(toolchain.ninja), *([] if jobs is None else ["-j", str(jobs)])]
    _run_for(command, work, timeout_seconds)
    logger.info("compiled the fused operators in %.0f s", time.monotonic() - start)
    (work / module).chmod(0o755)
    (work / module).rename(folder / module)
    shutil.rmtree(work)
    record = Built(
        folder=folder,
        architectures=names,
        sources=source_hash(),
        abi=_abi(),
        compiler=f"nvcc {toolchain.cuda_version}",
    )
    fields = {name: value for name, value in asdict(record).items() if name != "folder"}
    (folder / "build.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _run_for(command: list[str], folder: Path, timeout_seconds: float) -> None:
    """Run a program with its children in a group of its own, and end the group when its time is up."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise KernelBuildError(
                f"compiling the fused operators was given up after {timeout_seconds:.0f} s; allow more with "
                "NEOX_KERNELS_BUILD_TIMEOUT=SECONDS"
            ) from error
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        tail = "\n".join(output.strip().splitlines()[-20:])
        raise KernelBuildError(f"compiling the fused operators failed; the last lines were:\n{tail}")


def _ninja_file(folder: Path, module: str, architectures: Sequence[str], toolchain: Toolchain) -> str:
    """The build as ninja reads it: one object per source, then the module, with CUDA's runtime inside it."""

    def command(*words: str | Path) -> str:
        return " ".join(shlex.quote(str(word)).replace("$", "$$") for word in words)

    compiler = toolchain.host_compiler
    nvcc = command(toolchain.nvcc, "-ccbin", compiler, *NVCC_FLAGS, *_target_flags(architectures))
    includes = [f"-I{path}" for path in toolchain.include_folders]
    link = command(toolchain.nvcc, "-ccbin", compiler, "-shared", "-cudart", "static")
    lines = [
        f"rule nvcc\n  command = {nvcc} -c $in -o $out",
        f"rule cxx\n  command = {command(compiler, *CXX_FLAGS, *includes)} -c $in -o $out",
        f"rule link\n  command = {link} $in -o $out",
    ]
    objects = []
    for source in sorted(path.name for path in folder.iterdir() if path.suffix in (".cu", ".cpp")):
        objects.append(f"{source}.o")
        lines.append(f"build {source}.o: {'nvcc' if source.endswith('.cu') else 'cxx'} {source}")
    lines.append(f"build {module}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"
