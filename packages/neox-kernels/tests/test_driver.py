import re
import shutil
import subprocess

import pytest
import torch

from neox_kernels import build, driver, native


@pytest.fixture
def built(tmp_path):
    return build.Built(folder=tmp_path, architectures=("sm_90",), sources="", abi="", compiler="nvcc 13.0")


def test_a_launch_that_works_is_tried_once(built, emulated_module_path, monkeypatch):
    shutil.copy(emulated_module_path, built.module)
    assert driver.why_launch_fails(built, "cpu", "a GPU") is None
    monkeypatch.setattr(driver, "_TRIAL_LAUNCH", "/nowhere")
    assert driver.why_launch_fails(built, "cpu", "a GPU") is None
    assert "another GPU failed" in driver.why_launch_fails(built, "cpu", "another GPU")


def test_an_unreadable_version_of_the_driver_is_unknown(built, emulated_module_path, monkeypatch, tmp_path):
    shutil.copy(emulated_module_path, built.module)
    monkeypatch.setattr(driver, "_VERSION_FILE", tmp_path)
    assert driver.why_launch_fails(built, "cpu", "a GPU") is None


def test_a_launch_that_fails_makes_operators_unavailable(built, monkeypatch):
    # An empty file is no module; the trial's own process reports it.
    built.module.write_bytes(b"")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(native, "present_architectures", lambda: ("sm_90",))
    monkeypatch.setattr(build, "find_built", lambda architectures, cuda: built)
    monkeypatch.setattr(build, "load_module", lambda path: torch)
    native._loaded.cache_clear()
    state = native.state(may_build=False)
    native._loaded.cache_clear()
    assert not state.ok
    assert re.search(r"a trial launch on a GPU failed \(ImportError.*\); delete .* and run:", state.reason)
    assert not list(built.folder.glob("launched-*"))


def test_a_device_that_belongs_to_this_process_alone_is_not_blamed(built, monkeypatch):
    """As in the compute mode exclusive process, in which no other process can use the device."""
    busy = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    done = subprocess.CompletedProcess([], 1, "", f"Traceback\n{busy}\n")
    monkeypatch.setattr(driver.subprocess, "run", lambda *arguments, **options: done)
    (built.folder / built.module.name).touch()
    assert driver.why_launch_fails(built, "cuda:0", "H100") is None
    assert not list(built.folder.glob("launched-*"))
