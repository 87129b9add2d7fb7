"""A whole launch that the autoresume service of a cluster ends, and that continues exactly."""

from typing import Any

import pytest

from neox_model.checkpoint.contents import Manifest
from neox_model.metrics.writers.jsonl import read_records
from support.corpus import write_corpus
from support.launches import launch, write_job
from support.refusals import shows
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.slow

SERVICE = """
from pathlib import Path

calls = Path(__file__).with_name("calls")


class AutoResume:
    @staticmethod
    def init():
        calls.mkdir(exist_ok=True)

    @staticmethod
    def termination_requested():
        return Path(__file__).with_name("end").exists()

    @staticmethod
    def request_resume():
        latest = Path(__file__).parent / "checkpoints/latest"
        (calls / "resume").write_text(latest.read_text())
"""


def test_the_service_ends_a_launch_and_the_next_one_continues_to_the_last_bit(tmp_path, monkeypatch):
    """Two workers with dropout; the service is asked after iterations 2 and 4."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "cluster_service.py").write_text(SERVICE)
    settings: dict[str, Any] = SMALL_TRAINING | {
        "data_path": write_corpus(tmp_path),
        "train_iters": 4,
        "num_gpus": 2,
        "save_interval": 100,
        "log_interval": 1,
    }
    asks = {
        "adlr_autoresume": True,
        "adlr_autoresume_interval": 2,
        "adlr_autoresume_service": "cluster_service:AutoResume",
    }

    def run(folder: str, **changes: Any) -> None:
        folders = {"save": folder, "load": folder, "log_dir": f"{folder}/logs"}
        job = write_job(tmp_path, settings | folders | changes)
        result = launch(tmp_path, str(job), seconds=300)
        assert result.returncode == 0, result.stderr

    def tensors(folder: str, iteration: int) -> Any:
        return Manifest.read(tmp_path / folder / f"global_step{iteration}").tensors

    run("whole")
    (tmp_path / "end").touch()
    run("checkpoints", **asks)
    assert (tmp_path / "calls/resume").read_text() == "global_step2\n"
    (tmp_path / "end").unlink()
    (tmp_path / "calls/resume").unlink()
    run("checkpoints", **asks)
    assert not (tmp_path / "calls/resume").exists()
    assert tensors("checkpoints", 4) == tensors("whole", 4)
    record = tmp_path / "checkpoints/logs/metrics.jsonl"
    ends = [line["message"] for line in read_records(record) if line.get("event") == "end"]
    assert shows(ends[0], "autoresume service requests")
