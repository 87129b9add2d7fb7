"""What a worker of the doctor reports about its host."""

import os

from neox_model import doctor


def test_a_driver_that_does_not_answer_is_reported_as_unknown(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 600\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "_DRIVER_SECONDS", 0.2)
    assert doctor._ask_driver("driver_version") == "unknown"
