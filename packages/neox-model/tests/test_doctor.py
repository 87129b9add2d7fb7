"""What a worker of the doctor reports about its host."""

import os
from pathlib import Path

import pytest
import torch

from neox_model.assembly.attention_backend import AttentionBackend
from neox_model.doctor import host as doctor
from support.distributed import run_ranks
from support.refusals import shows
from support.settings import resolved_from


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
    with patch.object(doctor.socket, "gethostname", lambda: host):
        return doctor._folders(checkpoint, f"{folder}/logs", torch.device("cpu"))


def test_each_host_has_its_own_folder_for_local_checkpoints(tmp_path):
    found = run_ranks(folders_on_two_hosts, size=2, folder=str(tmp_path), is_shared=False)
    assert found == [[{"log-dir": ""}, {"save": ""}]] * 2
    found = run_ranks(folders_on_two_hosts, size=2, folder=str(tmp_path), is_shared=True)
    assert found[1][0] == {"log-dir": ""}
    assert shows(found[1][1]["save"], "save", "rank 0")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture
def facts_of(monkeypatch):
    """Return a function that examines this host alone."""
    for name in ("report_facts", "join_process_group", "_measure_all_reduce", "leave_processes"):
        monkeypatch.setattr(doctor, name, lambda *_, **__: None)
    monkeypatch.setattr(doctor, "_folders", lambda *_: ({}, {}))

    def examine(settings):
        resolved = resolved_from(settings)
        config = resolved.config
        return doctor.examine(
            resolved.model,
            resolved.run,
            config.training,
            data=config.data,
            written=config.checkpoint,
            log_dir=None,
            rank=0,
            local_rank=0,
        )

    return examine


def test_the_backends_of_attention_are_reported_for_the_training(facts_of):
    settings = {"attention_config": ["global", "local", "global"], "sparsity_config": {"block": 4}}
    found = facts_of(settings)
    assert found["attention"] == {"global": "flash", "local": "flash"}
    assert found["attention_notes"] == []


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_backends_are_asked_for_as_the_training_does_and_notes_are_reported_once(
    is_deterministic, facts_of, monkeypatch
):
    asked = []

    def backends(spec, run, device):
        asked.append(torch.are_deterministic_algorithms_enabled())
        return [
            AttentionBackend(kind=kind, layers=1, name="flash", note=note)
            for kind, note in (("global", "a"), ("local", "a"), ("bigbird", None))
        ]

    monkeypatch.setattr(doctor, "attention_backends", backends)
    try:
        found = facts_of({"deterministic": is_deterministic})
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [is_deterministic]
    assert found["attention_notes"] == ["a"]
    assert list(found["attention"]) == ["global", "local", "bigbird"]
