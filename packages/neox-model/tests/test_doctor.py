"""What a worker of the doctor reports about its host."""

import os
from pathlib import Path

from neox_model import doctor
from support.distributed import run_ranks


def test_a_driver_that_does_not_answer_is_reported_as_unknown(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 600\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "_DRIVER_SECONDS", 0.2)
    assert doctor._ask_driver("driver_version") == "unknown"


def folders_on_two_hosts(folder: str, is_shared: bool) -> tuple[dict[str, str], dict[str, str]]:
    from types import SimpleNamespace
    from unittest.mock import patch

    import torch
    from torch import distributed

    host = f"host-{distributed.get_rank()}"
    home = Path(folder) / ("shared" if is_shared else host)
    home.mkdir(exist_ok=True)
    os.chdir(home)
    checkpoint = SimpleNamespace(save="save", checkpoint=SimpleNamespace(use_node_local_storage=True))
    config = SimpleNamespace(checkpoint=checkpoint, logging=SimpleNamespace(log_dir=f"{folder}/logs"))
    with patch.object(doctor.socket, "gethostname", lambda: host):
        return doctor._folders(config, torch.device("cpu"))


def test_each_host_has_its_own_folder_for_local_checkpoints(tmp_path):
    found = run_ranks(folders_on_two_hosts, size=2, folder=str(tmp_path), is_shared=False)
    assert found == [[{"log-dir": ""}, {"save": ""}]] * 2
    found = run_ranks(folders_on_two_hosts, size=2, folder=str(tmp_path), is_shared=True)
    assert found[1] == [{"log-dir": ""}, {"save": "save is the same folder as on the host of rank 0"}]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
