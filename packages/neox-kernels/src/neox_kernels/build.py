"""Compile the fused operators, once per machine and user, in a folder that only this user can write.

The name of a build's folder contains hashes of the sources, the Python ABI and the compilers:

    CACHE/SOURCES-ABI-ARCHITECTURES-COMPILERS/_native.so, build.json

It is compiled in a temporary folder and renamed, under a lock. A failed build stores its error for the
processes that waited, so that eight ranks do not repeat it one after the other. The cache is
NEOX_KERNELS_CACHE, or neox-kernels in XDG_CACHE_HOME or ~/.cache. A wheel built with NEOX_KERNELS_PREBUILD=1
contains a build.

This module imports neither torch nor pybind11, so that a wheel can be built without torch.
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
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from neox_kernels.errors import KernelBuildError
from neox_kernels.locking import hold_lock
from neox_kernels.toolchain import Toolchain, find_toolchain

__all__ = [
    "Built",
    "build",
    "build_into",
    "cache_folder",
    "covers",
    "find_built",
    "load_module",
    "private_folder",
]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
DEFAULT_TIMEOUT_SECONDS = 900.0
_TIED_PROCESS = Path(__file__).parent / "tied_process.py"
_END_SECONDS = 10.0
NVCC_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden")
CXX_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A compiled module with its architectures, source hash, Python ABI and compiler."""

    folder: Path
    architectures: tuple[str, ...]
    sources: str
    abi: str
    compiler: str

    @property
    def module(self) -> Path:
        """Path of the compiled module."""
        return self.folder / f"_native{_abi()}"

    @property
    def description(self) -> str:
        """Short description for logs."""
        return f"compiled for {', '.join(self.architectures)} by {self.compiler}"


def _abi() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _short_hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def source_hash() -> str:
    """Return a hash of the sources and the compiler flags."""
    files = [name.encode() + b"\0" + (SOURCES / name).read_bytes() for name in sorted(os.listdir(SOURCES))]
    return _short_hash(*files, " ".join(NVCC_FLAGS + CXX_FLAGS).encode())


def cache_folder() -> Path:
    """Return the folder of the builds; it may not exist yet."""
    if folder := os.environ.get("NEOX_KERNELS_CACHE"):
        return Path(folder).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache").absolute() / "neox-kernels"


def _unsafe(path: Path) -> str | None:
    """Return why nothing may be loaded from a path that another user can change; None if it is safe."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link"
    if found.st_uid != os.getuid():
        return f"{path} belongs to user {found.st_uid}, not to {os.getuid()}"
    if found.st_mode & 0o022:
        return f"{path} is writable by other users (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def private_folder(folder: Path) -> Path:
    """Return the folder; create it with mode 0700 if it does not exist.

    Raises:
        KernelBuildError: it belongs to another user, or other users can write to it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        problem = _unsafe(folder)
    except OSError as error:
        raise KernelBuildError(
            f"cannot create the folder for compiled operators ({error}); set NEOX_KERNELS_CACHE to another"
        ) from error
    if problem is not None:
        raise KernelBuildError(
            f"unsafe folder for compiled operators: {problem}; run chmod 0700 on it or set "
            "NEOX_KERNELS_CACHE to another folder",
            code="unsafe-folder",
        )
    return folder


# Architectures ----------------------------------------------------------------------------------------------


def _number(architecture: str) -> int:
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", architecture)
    if found is None:
        raise KernelBuildError(
            f"unknown architecture {architecture!r}; use a name such as sm_80, sm_90 or sm_90a"
        )
    return int(found[1])


def covers(compiled: Sequence[str], present: Sequence[str]) -> bool:
    """Return whether a build for some architectures runs on GPUs of the present ones.

    Machine code runs on the same major version with the same or a later minor version; that of an "a"
    architecture only on itself. The PTX of the newest architecture runs on all later ones.
    """
    plain = {_number(name) for name in compiled if name[-1].isdigit()}
    newest = max(_number(name) for name in compiled)

    def runs(architecture: str) -> bool:
        number = _number(architecture)
        exact = number in {_number(name) for name in compiled}
        return exact or number > newest or any(p // 10 == number // 10 and p < number for p in plain)

    return all(runs(architecture) for architecture in present)


def _checked_architectures(names: Sequence[str], toolchain: Toolchain) -> tuple[str, ...]:
    if not names:
        raise KernelBuildError(
            "no GPU was found and no architecture was given; pass one, for example --arch sm_90"
        )
    known = toolchain.known_architectures
    for name in names:
        if f"sm_{_number(name)}" not in known:  # Suffixed names are not listed.
            raise KernelBuildError(
                f"nvcc of CUDA {toolchain.cuda_version} does not support {name} (supported: "
                f"{', '.join(known)}); install a CUDA toolkit that does and set CUDA_HOME to it"
            )
    return tuple(sorted(set(names), key=lambda name: (_number(name), name)))


# Finding and loading ----------------------------------------------------------------------------------------


def _read_built(folder: Path) -> Built | None:
    record = folder / "build.json"
    if not record.is_file():
        return None
    try:
        stored = json.loads(record.read_text(encoding="utf-8"))
        return Built(
            folder=folder,
            architectures=tuple(stored["architectures"]),
            sources=stored["sources"],
            abi=stored["abi"],
            compiler=stored["compiler"],
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s cannot be read, so this build is not used: %r", record, error)
        return None


def list_built() -> list[Built]:
    """Return the builds of these sources for this Python: the wheel's first, then the newest first."""
    cache, records = cache_folder(), list[Path]()
    try:
        if cache.is_dir() and _unsafe(cache) is None:
            records = sorted(cache.glob("*/build.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError as error:
        logger.warning("the folder of compiled operators cannot be read: %s", error)
    found = map(_read_built, (PREBUILT, *(path.parent for path in records)))
    fits = [built for built in found if built and built.sources == source_hash() and built.abi == _abi()]
    return [built for built in fits if _is_safe(built)]


def _is_safe(built: Built) -> bool:
    if built.folder == PREBUILT:
        return True  # Installed with the package's Python files.
    problem = _unsafe(built.folder) or _unsafe(built.module)
    if problem is not None:
        logger.warning("not loading an unsafe compiled module: %s", problem)
    return problem is None


def find_built(architectures: Sequence[str], cuda: str | None = None) -> Built | None:
    """Return a build that runs on GPUs of these architectures, or None.

    If a compiler for PyTorch's version of CUDA (`cuda`) is present, builds of other compilers in the cache
    are not used.
    """
    try:
        compiler = find_toolchain(cuda).identity
    except KernelBuildError:
        compiler = None  # Without a compiler, any matching build is used.
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
    architectures: Sequence[str],
    *,
    cuda: str | None = None,
    jobs: int | None = None,
    timeout_seconds: float | None = None,
) -> Built:
    """Compile for these architectures unless they are compiled; wait if another process is compiling.

    Args:
        architectures: such as ("sm_80", "sm_90a"); PTX of the newest is added for later GPUs.
        cuda: version of CUDA that PyTorch is built for; the toolkit has the same major version. None: any.
        jobs: number of parallel compilations; None for ninja's default.
        timeout_seconds: limit for waiting and for compiling; None for NEOX_KERNELS_BUILD_TIMEOUT or 900.

    Raises:
        KernelBuildError: a compiler is missing, too old or for another CUDA, compilation failed or timed out,
            or the cache cannot be written.
    """
    try:
        seconds = _timeout() if timeout_seconds is None else timeout_seconds
        return _build(architectures, find_toolchain(cuda), jobs, seconds)
    except OSError as error:
        raise KernelBuildError(
            f"cannot write compiled operators to {cache_folder()} ({error}); set NEOX_KERNELS_CACHE to a "
            "folder that this user can write, on a disk with free space",
            code="not-writable",
        ) from error


def _timeout() -> float:
    text = os.environ.get("NEOX_KERNELS_BUILD_TIMEOUT", str(DEFAULT_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise KernelBuildError(f"NEOX_KERNELS_BUILD_TIMEOUT is {text[:80]!r}; set it to a number of seconds")
    return seconds


def _build(
    architectures: Sequence[str], toolchain: Toolchain, jobs: int | None, timeout_seconds: float
) -> Built:
    names = _checked_architectures(architectures, toolchain)
    cache = private_folder(cache_folder())
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
            with suppress(OSError):  # The error of the compilation is the useful one.
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
    for left in place.parent.glob(f"{prefix}*"):  # Left by a killed build: this process holds the lock.
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
    try:
        build_into(aside, architectures, toolchain, jobs=jobs, timeout_seconds=timeout_seconds)
        shutil.rmtree(place, ignore_errors=True)  # An existing build was unsafe to load.
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
    """Compile into an existing folder; keep only the module and build.json.

    Raises:
        KernelBuildError: compilation failed or timed out.
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
    (folder / "build.json").write_text(json.dumps(fields, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _run_for(command: list[str], folder: Path, timeout_seconds: float) -> None:
    """Run ninja; end it and its compilers after the timeout, or when this process ends."""
    with subprocess.Popen(
        [sys.executable, "-I", str(_TIED_PROCESS), str(os.getpid()), *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired as error:
            _end(process)
            raise KernelBuildError(
                f"compiling the fused operators timed out after {timeout_seconds:.0f} s; set "
                "NEOX_KERNELS_BUILD_TIMEOUT=SECONDS to allow more"
            ) from error
        except BaseException:
            _end(process)
            raise
    if process.returncode != 0:
        tail = "\n".join(output.strip().splitlines()[-20:])
        raise KernelBuildError(
            f"compiling the fused operators failed; last lines of the output:\n{tail}", code="failed"
        )


def _end(process: "subprocess.Popen[str]") -> None:
    """End ninja. On SIGTERM it ends its compilers, which are in process groups of their own."""
    process.terminate()
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ninja_file(folder: Path, module: str, architectures: Sequence[str], toolchain: Toolchain) -> str:
    """Return the ninja file: one object per source, linked into a module with CUDA's static runtime."""

    def command(*words: str | Path) -> str:
        return " ".join(shlex.quote(str(word)).replace("$", "$$") for word in words)

    compiler, newest = toolchain.host_compiler, max(_number(name) for name in architectures)
    targets = [f"-gencode=arch=compute_{name[3:]},code={name}" for name in architectures]
    targets.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    nvcc = command(toolchain.nvcc, "-ccbin", compiler, *NVCC_FLAGS, *targets)
    includes = [f"-I{path}" for path in toolchain.include_folders]
    link = command(toolchain.nvcc, "-ccbin", compiler, "-shared", "-cudart", "static")
    lines = [
        f"rule nvcc\n  command = {nvcc} -c $in -o $out",
        f"rule cxx\n  command = {command(compiler, *CXX_FLAGS, *includes)} -c $in -o $out",
        f"rule link\n  command = {link} $in -o $out",
    ]
    sources = sorted(path.name for path in folder.iterdir() if path.suffix in (".cu", ".cpp"))
    lines += [
        f"build {source}.o: {'nvcc' if source.endswith('.cu') else 'cxx'} {source}" for source in sources
    ]
    lines.append(f"build {module}: link {' '.join(f'{source}.o' for source in sources)}")
    return "\n".join(lines) + "\n"
