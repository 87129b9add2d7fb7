import errno
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from neox_kernels import KernelBuildError, KernelUnavailable, build, choice, cli, native, toolchain
from neox_kernels.availability import Availability
from neox_kernels.locking import hold_lock
from neox_kernels.operators.rms_norm import rms_norm
from support.refusals import refused, shows

PACKAGE = Path(build.__file__).parent
SOURCES = sorted(path.name for path in (PACKAGE / "csrc").glob("*.cu"))

FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {release}, V0"; exit 0 ;;
  *--list-gpu-code*) echo "sm_80 sm_90 sm_90a sm_100"; exit 0 ;;
esac
echo "$*" >> {log}
{extra}
while [ $# -gt 1 ]; do [ "$1" = "-o" ] && : > "$2"; shift; done
"""

# Import build.py without the package's __init__, which imports torch.
BUILD_ALONE = f"""
import sys, types, logging
package = types.ModuleType("neox_kernels")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["neox_kernels"] = package
logging.basicConfig(level=logging.INFO, format="%(message)s")
from neox_kernels import build
from neox_kernels.errors import KernelBuildError
try:
    built = build.build(("sm_90",))
    print(built.folder)
except KernelBuildError as error:
    print("failed:", error)
assert "torch" not in sys.modules
"""


class Compiler:
    """A fake CUDA compiler that records its arguments and creates empty files."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.log = folder, folder / "log"
        monkeypatch.setenv("CUDA_HOME", str(folder))
        monkeypatch.setenv("NEOX_KERNELS_CACHE", str(folder / "cache"))
        monkeypatch.setenv("CXX", str(folder / "bin" / "nvcc"))
        self.write()

    def write(self, *, release="13.0", extra=""):
        program = self.folder / "bin" / "nvcc"
        program.parent.mkdir(exist_ok=True, parents=True)
        # Written aside: a compiler that is just being started keeps its file from being opened for writing.
        aside = program.with_name("nvcc.new")
        aside.write_text(FAKE_NVCC.format(release=release, log=self.log, extra=extra))
        aside.chmod(0o755)
        aside.replace(program)

    def compiled(self):
        """Return the sources compiled so far, sorted, with repetitions."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sorted(
            word for line in lines if " -c " in line for word in line.split() if word.endswith(".cu")
        )

    def start(self):
        return subprocess.Popen(
            [sys.executable, "-c", BUILD_ALONE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    return Compiler(tmp_path, monkeypatch)


def wait_for(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("the condition did not become true")


def test_building_twice_compiles_once(compiler):
    first = build.build(("sm_90",))
    second = build.build(("sm_90",))
    assert compiler.compiled() == SOURCES
    assert first == second
    assert first.module.exists()
    assert shows(first.description, "sm_90", "nvcc 13.0")
    assert sorted(path.name for path in first.folder.iterdir()) == sorted([first.module.name, "build.json"])


@pytest.mark.slow
def test_concurrent_builds_compile_once(compiler):
    compiler.write(extra="sleep 0.3")
    processes = [compiler.start() for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert compiler.compiled() == SOURCES
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].startswith(str(compiler.folder / "cache"))
    waiting = [talk for _, talk in outputs if "waiting for process" in talk]
    assert len(waiting) == 1
    assert "operators for sm_90" in waiting[0]


def ended(pids):
    """Return whether the processes with these ids have ended; a zombie has."""
    states = []
    for pid in pids:
        try:
            states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            states.append("ended")
    return all(state in ("Z", "ended") for state in states)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_build_that_is_ended_releases_the_lock_and_ends_its_compilers(compiler, number):
    pids = compiler.folder / "pids"
    compiler.write(extra=f"echo $$ >> {pids}; sleep 600 & echo $! >> {pids}; wait")
    process = compiler.start()
    wait_for(lambda: pids.exists() and pids.read_text().count("\n") > 1)
    process.send_signal(number)
    process.communicate()
    wait_for(lambda: ended(pids.read_text().split()))
    compiler.write()
    assert build.build(("sm_90",), timeout_seconds=20).module.exists()
    assert list((compiler.folder / "cache").glob("building-*")) == []


def test_waiting_times_out_and_names_the_holder(compiler):
    compiler.write(extra="sleep 30")
    process = compiler.start()
    wait_for(lambda: compiler.log.exists())
    with refused(KernelBuildError, f"process {process.pid}", "0 s"):
        build.build(("sm_90",), timeout_seconds=0.3)
    process.terminate()
    process.communicate()


@pytest.mark.slow
def test_hanging_compiler_is_killed_after_the_timeout(compiler):
    pids = compiler.folder / "pids"
    compiler.write(extra=f"echo $$ >> {pids}; exec sleep 600")
    # Long enough for the compilers to start on a busy machine.
    with refused(KernelBuildError, "6 s", "NEOX_KERNELS_BUILD_TIMEOUT"):
        build.build(("sm_90",), timeout_seconds=6)
    assert pids.exists()
    wait_for(lambda: ended(pids.read_text().split()))


def test_failure_shows_the_last_lines_and_removes_temporary_files(compiler):
    compiler.write(extra="echo softmax.cu: error: expected a comma; exit 2")
    with refused(KernelBuildError, code="failed"):
        build.build(("sm_90",))
    assert build.list_built() == []
    assert list((compiler.folder / "cache").glob("building-*")) == []
    compiler.write()
    assert build.build(("sm_90",)).module.exists()


def test_processes_waiting_for_a_failed_build_do_not_repeat_it(compiler):
    compiler.write(extra="sleep 1; echo broken; exit 2")
    processes = [compiler.start() for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert all("fused operators failed" in output for output in outputs)
    assert len(compiler.compiled()) <= len(SOURCES)


def test_build_folder_depends_on_architectures_sources_and_compiler(compiler, monkeypatch, tmp_path):
    folders = {build.build(("sm_90",)).folder, build.build(("sm_80", "sm_90")).folder}
    compiler.write(release="13.1")
    folders.add(build.build(("sm_90",)).folder)
    changed = tmp_path / "csrc"
    changed.mkdir()
    for path in (PACKAGE / "csrc").iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    (changed / "softmax.cu").write_text("// another\n")
    monkeypatch.setattr(build, "SOURCES", changed)
    folders.add(build.build(("sm_90",)).folder)
    assert len(folders) == 4


def test_the_newest_architecture_is_also_compiled_as_portable_code(compiler):
    build.build(("sm_90a", "sm_80"))
    # The order of compilation is not fixed, and the bindings are not CUDA.
    line = next(line for line in compiler.log.read_text().splitlines() if "softmax.cu" in line)
    assert "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a" in line
    assert "-gencode=arch=compute_90,code=compute_90" in line


@pytest.mark.parametrize(
    ("compiled", "present", "runs"),
    [
        (("sm_90",), ("sm_90",), True),
        (("sm_80",), ("sm_86",), True),
        (("sm_86",), ("sm_80",), False),
        (("sm_80",), ("sm_90",), True),
        (("sm_80", "sm_100"), ("sm_90",), False),
        (("sm_90",), ("sm_80", "sm_90"), False),
        (("sm_90a",), ("sm_90",), True),
        (("sm_90a",), ("sm_100",), True),
        (("sm_100",), ("sm_120",), True),
        (("sm_80", "sm_90"), (), True),
    ],
)
def test_architectures_covered_by_a_build(compiled, present, runs):
    assert build.covers(compiled, present) is runs


def test_build_is_found_for_its_architectures_and_compiler(compiler):
    assert build.find_built(("sm_90",)) is None
    built = build.build(("sm_90",))
    assert build.find_built(("sm_90",)) == built
    assert build.find_built(("sm_80",)) is None
    compiler.write(release="13.1")
    assert build.find_built(("sm_90",)) is None
    (compiler.folder / "bin" / "nvcc").unlink()
    assert build.find_built(("sm_90",)) == built


@pytest.mark.parametrize("which", ["folder", "module", "cache"])
def test_files_writable_by_others_are_not_loaded(compiler, which):
    built = build.build(("sm_90",))
    {"folder": built.folder, "module": built.module, "cache": built.folder.parent}[which].chmod(0o777)
    assert build.find_built(("sm_90",)) is None


def test_cache_writable_by_others_is_refused(compiler):
    (compiler.folder / "cache").mkdir()
    (compiler.folder / "cache").chmod(0o777)
    with refused(KernelBuildError, "0777", "chmod 0700", code="unsafe-folder"):
        build.build(("sm_90",))


def test_the_cache_is_private(compiler):
    built = build.build(("sm_90",))
    assert (built.folder.parent.stat().st_mode & 0o777, built.folder.stat().st_mode & 0o777) == (0o700, 0o700)


@pytest.mark.parametrize("place", ["lock", "folder", "failure"])
def test_cache_that_cannot_be_written_is_a_message_with_the_remedy(compiler, monkeypatch, place):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(compiler.folder / "cache"))

    if place == "lock":
        monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    elif place == "folder":
        monkeypatch.setattr("tempfile.mkdtemp", refuse)
    else:
        compiler.write(extra="echo broken; exit 2")
        monkeypatch.setattr("pathlib.Path.write_text", _only_ninja_files(Path.write_text, refuse))
    code = "failed" if place == "failure" else "not-writable"
    with refused(KernelBuildError, code=code):
        build.build(("sm_90",))


def _only_ninja_files(write, refuse):
    def write_text(path, text, **options):
        return refuse() if path.suffix == ".failed" else write(path, text, **options)

    return write_text


def test_without_a_writable_cache_auto_uses_the_reference_implementation(compiler, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("neox_kernels.native.present_architectures", lambda: ("sm_90",))
    native._loaded.cache_clear()
    options = {"device": "cuda", "dtype": torch.float32, "shape": (4, 8)}
    assert choice.choose("auto", rms_norm, **options) is rms_norm.reference
    with refused(KernelUnavailable, "Read-only", "NEOX_KERNELS_CACHE"):
        choice.choose(True, rms_norm, **options)
    native._loaded.cache_clear()


def test_damaged_builds_are_not_used(compiler, monkeypatch, caplog):
    built = build.build(("sm_90",))
    (built.folder / "build.json").write_text("{")
    assert build.find_built(("sm_90",)) is None
    assert "build.json cannot be" in caplog.text
    assert build.build(("sm_90",)) == built
    # The fake compiler makes an empty module.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("neox_kernels.native.present_architectures", lambda: ("sm_90",))
    native._loaded.cache_clear()
    state = native.state(may_build=True)
    native._loaded.cache_clear()
    assert not state.ok
    assert "cannot be loaded" in state.reason
    assert state.reason.endswith(f"delete {built.folder} to compile it again")


@pytest.mark.parametrize("text", ["soon", "nan", "-1", ""])
def test_timeout_that_is_not_a_number_of_seconds_is_refused(compiler, monkeypatch, text):
    monkeypatch.setenv("NEOX_KERNELS_BUILD_TIMEOUT", text)
    with refused(KernelBuildError, "NEOX_KERNELS_BUILD_TIMEOUT"):
        build.build(("sm_90",))


def test_holder_of_a_removed_lock_file_is_another_process(tmp_path, monkeypatch):
    def removed(*args, **options):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    path = tmp_path / "lock"
    with hold_lock(path, timeout_seconds=1, purpose="compiling"):
        monkeypatch.setattr("pathlib.Path.read_text", removed)
        second = hold_lock(path, timeout_seconds=0.1, purpose="compiling")
        with refused(KernelBuildError, "another process", "lock", "0 s (compiling)"), second:
            pass


def test_symbolic_link_as_cache_is_refused(compiler):
    (compiler.folder / "elsewhere").mkdir(mode=0o700)
    (compiler.folder / "cache").symlink_to(compiler.folder / "elsewhere")
    with refused(KernelBuildError, code="unsafe-folder"):
        build.build(("sm_90",))


def test_prebuilt_module_of_the_wheel_comes_first(compiler, monkeypatch):
    build.build(("sm_90",))
    prebuilt = compiler.folder / "prebuilt"
    prebuilt.mkdir()
    build.build_into(prebuilt, ("sm_90",), toolchain.find_toolchain())
    monkeypatch.setattr(build, "PREBUILT", prebuilt)
    assert build.find_built(("sm_90",)).folder == prebuilt


def test_errors_about_the_toolchain_end_with_the_remedy(compiler, monkeypatch):
    with refused(KernelBuildError, "sm_70", "sm_80", "CUDA"):
        build.build(("sm_70",))
    with refused(KernelBuildError, "'ninety'"):
        build.build(("ninety",))
    compiler.write(release="10.2")
    with refused(KernelBuildError, "CUDA 10.2", "require 11.8"):
        build.build(("sm_80",))
    (compiler.folder / "bin" / "nvcc").unlink()
    with refused(KernelBuildError, code="no-nvcc"):
        build.build(("sm_80",))


@pytest.fixture
def several_toolkits(compiler, tmp_path, monkeypatch):
    """CUDA 13.0 in CUDA_HOME, 11.8 on PATH, 12.8 and 12.4 among the installed ones."""
    for place, release in {"path": "11.8", "local/cuda-12.8": "12.8", "local/cuda-12.4": "12.4"}.items():
        Compiler(tmp_path / place, monkeypatch).write(release=release)
    for name in ("local/cuda", "local/cuda-13.0"):
        (tmp_path / name).symlink_to(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("NEOX_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path/bin'}:/usr/bin:/bin")
    monkeypatch.setattr(toolchain, "_INSTALLED", tmp_path / "local")
    return tmp_path


@pytest.mark.parametrize(
    ("cuda", "chosen"),
    [(None, "bin"), ("13.2", "bin"), ("12.1", "local/cuda-12.8/bin"), ("11.8", "path/bin")],
)
def test_the_toolkit_has_the_major_version_of_pytorch(cuda, chosen, several_toolkits):
    assert toolchain.find_toolchain(cuda).nvcc == several_toolkits / chosen / "nvcc"


def test_without_a_toolkit_of_pytorch_s_version_those_found_are_listed(several_toolkits):
    with pytest.raises(KernelBuildError) as caught:
        build.build(("sm_90",), cuda="14.1")
    text = str(caught.value)
    assert text.startswith(
        "this PyTorch is built for CUDA 14.1, and no toolkit of CUDA 14 was found, only 13.0 ("
    )
    assert [release for release in ("13.0", "11.8", "12.8", "12.4") if text.count(f"{release} (") == 1] == [
        "13.0", "11.8", "12.8", "12.4",
    ]  # fmt: skip


def test_a_build_of_another_toolkit_is_not_used_for_this_pytorch(several_toolkits):
    built = build.build(("sm_90",), cuda="12.8")
    assert built.compiler == "nvcc 12.8"
    assert build.find_built(("sm_90",), "12.1") == built
    assert build.find_built(("sm_90",), "13.0") is None


def test_missing_host_compiler_is_reported(compiler, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("PATH", str(compiler.folder / "bin"))
    with refused(KernelBuildError, code="no-compiler"):
        build.build(("sm_80",))


def test_build_command_prints_path_and_architectures(compiler):
    result = CliRunner().invoke(cli.main, ["build", "--arch", "sm_90"])
    assert result.exit_code == 0
    assert result.stdout.startswith(str(compiler.folder / "cache"))
    assert result.stdout.endswith("compiled for sm_90 by nvcc 13.0\n")


def test_build_command_without_a_gpu_requires_an_architecture(compiler, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(cli.main, ["build"])
    assert result.exit_code == 1
    assert "example --arch sm_90" in result.stderr


def test_status_command_prints_why_operators_are_unavailable(compiler, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    build.build(("sm_90",))
    result = CliRunner().invoke(cli.main, ["status"])
    assert result.exit_code == 0
    assert shows(result.stdout, "sm_90", "nvcc 13.0")
    assert "NVIDIA GPU is" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("rms_norm")]
    assert len(lines) == 1
    assert "an NVIDIA GPU" in lines[0]


@pytest.mark.parametrize("prebuilds", [True, False])
def test_wheel_contains_a_build_only_if_requested(compiler, monkeypatch, tmp_path, prebuilds):
    pytest.importorskip("setuptools")
    package = tmp_path / "package"
    root = PACKAGE.parents[1]
    if not (root / "setup.py").is_file():
        pytest.skip("the package is installed apart from its sources")
    shutil.copytree(root, package, ignore=shutil.ignore_patterns("tests", "build", "*.egg-info"))
    monkeypatch.setenv("NEOX_KERNELS_PREBUILD", "1" if prebuilds else "0")
    monkeypatch.setenv("NEOX_KERNELS_ARCHITECTURES", "sm_80 sm_90")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "wheel")]
    subprocess.run(command, cwd=package, check=True, capture_output=True)
    made = tmp_path / "wheel" / "neox_kernels"
    assert (made / "csrc" / "softmax.cu").is_file()
    assert (made / "prebuilt" / "build.json").is_file() is prebuilds
    assert compiler.compiled() == (SOURCES if prebuilds else [])


def test_a_wheel_with_a_build_requires_what_compiling_imports(tmp_path, monkeypatch):
    pytest.importorskip("setuptools")
    root = PACKAGE.parents[1]
    if not (root / "setup.py").is_file():
        pytest.skip("the package is installed apart from its sources")
    package = tmp_path / "package"
    shutil.copytree(root, package, ignore=shutil.ignore_patterns("tests", "build", "*.egg-info"))
    monkeypatch.setenv("NEOX_KERNELS_PREBUILD", "1")
    program = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=package, check=True, capture_output=True, text=True
    )
    for name in ("filelock", "ninja", "pybind11"):
        assert f"'{name}>=" in done.stdout.splitlines()[-1]


def test_status_command_prints_a_folder_that_cannot_be_encoded(compiler, monkeypatch):
    reason = "/\udcff cannot be loaded"
    monkeypatch.setattr(native, "state", lambda may_build: Availability(False, reason))
    result = CliRunner().invoke(cli.main, ["status"])
    assert result.exit_code == 0
    assert "cannot be loaded" in result.stdout
