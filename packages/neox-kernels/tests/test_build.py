import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_kernels import KernelBuildError, build, cli, toolchain

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

# The builder without the package's __init__, which imports torch.
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
    """A CUDA compiler that only says what it was asked, and makes empty files."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.log = folder, folder / "log"
        monkeypatch.setenv("CUDA_HOME", str(folder))
        monkeypatch.setenv("NEOX_KERNELS_CACHE", str(folder / "cache"))
        monkeypatch.setenv("CXX", str(folder / "bin" / "nvcc"))
        self.write()

    def write(self, *, release="13.0", extra=""):
        program = self.folder / "bin" / "nvcc"
        program.parent.mkdir(exist_ok=True)
        program.write_text(FAKE_NVCC.format(release=release, log=self.log, extra=extra))
        program.chmod(0o755)

    def compiled(self):
        """The sources compiled so far, in alphabetical order, with repetitions."""
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
    for _ in range(600):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def test_building_twice_compiles_once(compiler):
    first = build.build(("sm_90",))
    second = build.build(("sm_90",))
    assert compiler.compiled() == SOURCES
    assert first == second
    assert first.module.exists()
    assert first.description == "compiled for sm_90 by nvcc 13.0"
    assert sorted(path.name for path in first.folder.iterdir()) == sorted([first.module.name, "build.json"])


def test_two_processes_that_build_at_once_compile_once(compiler):
    compiler.write(extra="sleep 0.3")
    processes = [compiler.start() for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert compiler.compiled() == SOURCES
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].startswith(str(compiler.folder / "cache"))
    waiting = [talk for _, talk in outputs if "waiting for process" in talk]
    assert len(waiting) == 1
    assert "compiling the fused operators for sm_90" in waiting[0]


def test_the_lock_of_a_killed_builder_is_free(compiler):
    pids = compiler.folder / "pids"
    compiler.write(extra=f"echo $$ >> {pids}; exec sleep 600")
    process = compiler.start()
    wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"))
    process.kill()
    process.communicate()
    compiler.write()
    assert build.build(("sm_90",), timeout_seconds=20).module.exists()
    assert list((compiler.folder / "cache").glob("building-*")) == []
    for pid in pids.read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def test_waiting_ends_with_the_reason(compiler):
    compiler.write(extra="sleep 30")
    process = compiler.start()
    wait_for(lambda: compiler.log.exists())
    with pytest.raises(KernelBuildError, match=rf"process {process.pid} on .* has held .* for 0 s"):
        build.build(("sm_90",), timeout_seconds=0.3)
    process.terminate()
    process.communicate()


def test_a_compiler_that_hangs_is_ended(compiler):
    compiler.write(extra="sleep 30")
    start = time.monotonic()
    with pytest.raises(KernelBuildError, match="was given up after 1 s; allow more"):
        build.build(("sm_90",), timeout_seconds=0.6)
    assert time.monotonic() - start < 20


def test_a_failure_shows_the_last_lines_and_leaves_nothing(compiler):
    compiler.write(extra="echo softmax.cu: error: expected a comma; exit 2")
    with pytest.raises(KernelBuildError, match=r"(?s)last lines were.*error: expected a comma"):
        build.build(("sm_90",))
    assert build.list_built() == []
    assert list((compiler.folder / "cache").glob("building-*")) == []
    compiler.write()
    assert build.build(("sm_90",)).module.exists()


def test_those_who_waited_for_a_failure_do_not_repeat_it(compiler):
    compiler.write(extra="sleep 1; echo broken; exit 2")
    processes = [compiler.start() for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert all("failed: compiling the fused operators failed" in output for output in outputs)
    assert len(compiler.compiled()) <= len(SOURCES)


def test_another_architecture_source_or_compiler_is_another_build(compiler, monkeypatch, tmp_path):
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
    # ninja starts the files in an order of its own, and the bindings are not CUDA.
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
def test_which_gpus_a_build_runs_on(compiled, present, runs):
    assert build.covers(compiled, present) is runs


def test_a_build_is_found_again_where_it_runs(compiler):
    assert build.find_built(("sm_90",)) is None
    built = build.build(("sm_90",))
    assert build.find_built(("sm_90",)) == built
    assert build.find_built(("sm_80",)) is None
    compiler.write(release="13.1")
    assert build.find_built(("sm_90",)) is None
    (compiler.folder / "bin" / "nvcc").unlink()
    assert build.find_built(("sm_90",)) == built


@pytest.mark.parametrize("which", ["folder", "module", "cache"])
def test_what_others_can_write_is_not_loaded(compiler, which):
    built = build.build(("sm_90",))
    {"folder": built.folder, "module": built.module, "cache": built.folder.parent}[which].chmod(0o777)
    assert build.find_built(("sm_90",)) is None


def test_a_folder_that_others_can_write_is_refused(compiler):
    (compiler.folder / "cache").mkdir()
    (compiler.folder / "cache").chmod(0o777)
    with pytest.raises(KernelBuildError, match=r"can be written by others \(mode 0777\); chmod it to 0700"):
        build.build(("sm_90",))


def test_the_cache_is_private(compiler):
    built = build.build(("sm_90",))
    assert (built.folder.parent.stat().st_mode & 0o777, built.folder.stat().st_mode & 0o777) == (0o700, 0o700)


def test_a_link_in_place_of_the_cache_is_refused(compiler):
    (compiler.folder / "elsewhere").mkdir(mode=0o700)
    (compiler.folder / "cache").symlink_to(compiler.folder / "elsewhere")
    with pytest.raises(KernelBuildError, match="is a link"):
        build.build(("sm_90",))


def test_a_wheels_own_build_is_taken_first(compiler, monkeypatch):
    build.build(("sm_90",))
    prebuilt = compiler.folder / "prebuilt"
    prebuilt.mkdir()
    build.build_into(prebuilt, ("sm_90",), toolchain.find_toolchain())
    monkeypatch.setattr(build, "PREBUILT", prebuilt)
    assert build.find_built(("sm_90",)).folder == prebuilt


def test_what_is_missing_is_one_sentence_with_the_remedy(compiler, monkeypatch):
    with pytest.raises(
        KernelBuildError, match=r"cannot compile for sm_70; it knows sm_80, .* install a CUDA toolkit"
    ):
        build.build(("sm_70",))
    with pytest.raises(KernelBuildError, match="'ninety' names no architecture"):
        build.build(("ninety",))
    compiler.write(release="10.2")
    with pytest.raises(KernelBuildError, match=r"is of CUDA 10\.2; the fused operators need 11\.8 or newer"):
        build.build(("sm_80",))
    (compiler.folder / "bin" / "nvcc").unlink()
    with pytest.raises(KernelBuildError, match=r"nvcc, and it was not found \(CUDA_HOME names .*\); install"):
        build.build(("sm_80",))


def test_a_missing_host_compiler_is_said(compiler, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("PATH", str(compiler.folder / "bin"))
    with pytest.raises(KernelBuildError, match=r"needs a C\+\+ compiler, and there is none on the PATH"):
        build.build(("sm_80",))


def test_command_build_says_where_and_for_what(compiler):
    result = CliRunner().invoke(cli.main, ["build", "--arch", "sm_90"])
    assert result.exit_code == 0
    assert result.stdout.startswith(str(compiler.folder / "cache"))
    assert result.stdout.endswith("compiled for sm_90 by nvcc 13.0\n")


def test_command_build_without_a_gpu_asks_for_an_architecture(compiler, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(cli.main, ["build"])
    assert result.exit_code == 1
    assert "name one with --arch" in result.stderr


def test_command_status_says_of_each_operator_why_not(compiler, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    build.build(("sm_90",))
    result = CliRunner().invoke(cli.main, ["status"])
    assert result.exit_code == 0
    assert "compiled for sm_90 by nvcc 13.0" in result.stdout
    assert "This process sees no NVIDIA GPU." in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("rms_norm")]
    assert len(lines) == 1
    assert "not available: the fused operators run on NVIDIA GPUs" in lines[0]


@pytest.mark.parametrize("prebuilds", [True, False])
def test_a_wheel_carries_a_build_only_where_that_was_asked_for(compiler, monkeypatch, tmp_path, prebuilds):
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
