"""The GPUs of this machine as reported by `nvidia-smi`."""

from pathlib import Path

import pytest

from neox_launcher.resources.local_gpus import smallest_gpu_memory


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Return `says(text, code)`, which puts only an `nvidia-smi` with this output and exit code on PATH."""

    def pretend(text, code=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    monkeypatch.setenv("PATH", str(Path(tmp_path, "nothing")))
    return pretend


def test_the_smallest_gpu_decides(says):
    says("81559\n40960")
    assert smallest_gpu_memory() == 40960 * 2**20


@pytest.mark.parametrize(("text", "code"), [("no devices were found", 0), ("81559", 9), ("[N/A]", 0)])
def test_malformed_output_gives_none(says, text, code):
    says(text, code)
    assert smallest_gpu_memory() is None


def test_a_missing_nvidia_smi_gives_none(says):
    assert smallest_gpu_memory() is None
