"""What Comet receives, read back from the archive of an offline experiment."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("comet_ml") is None,
    reason="requires the package comet_ml; run: make sweep NAME=services",
)

# In a separate process, because comet_ml patches other modules.
PROGRAM = """
import sys

from neox_model.metrics.writers.comet import CometWriter, require_comet

require_comet(online=False)
key, mode, first = sys.argv[1] or None, sys.argv[2], int(sys.argv[3])
writer = CometWriter(
    name="first",
    tags=["small", "test"],
    others={"comment": "a comment"},
    workspace="w",
    project_name="p",
    experiment_key=key,
    mode=mode,
    online=False,
)
for step in (first, first + 8):
    writer.write({"loss/train": 1 / step, "lr": 0.5}, step)
writer.flush()
writer.close()
print("key", writer.run_key)
"""


def write(folder: Path, *arguments: str) -> str:
    """Run the program; return the key of the experiment."""
    settings = {"COMET_OFFLINE_DIRECTORY": str(folder), "COMET_DISABLE_AUTO_LOGGING": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.rpartition("key ")[2].strip()


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the description of the only experiment in a folder, and its messages."""
    [path] = folder.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        lines = archive.read("messages.json").decode().splitlines()
        return json.loads(archive.read("experiment.json")), [json.loads(line) for line in lines]


def metrics_of(messages: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    found = [each["payload"]["metric"] for each in messages if each["type"] == "metric_msg"]
    return [
        (each["metricName"], each["step"], each["metricValue"])
        for each in found
        if each["metricName"] in ("loss/train", "lr")
    ]


def test_an_offline_experiment_has_all_settings_and_metrics_and_is_continued(tmp_path):
    key = write(tmp_path / "first", "", "create", "8")
    described, messages = read(tmp_path / "first")
    assert (described["offline_id"], described["project_name"], described["workspace"]) == (key, "p", "w")
    assert described["tags"] == ["small", "test"]
    others = {
        each["payload"]["key"]: each["payload"]["value"] for each in messages if each["type"] == "log_other"
    }
    assert others["Name"] == "first"
    assert others["comment"] == "a comment"
    expected = [("loss/train", 8, 1 / 8), ("lr", 8, 0.5), ("loss/train", 16, 1 / 16), ("lr", 16, 0.5)]
    assert metrics_of(messages) == expected
    assert write(tmp_path / "second", key, "get_or_create", "24") == key
    described, messages = read(tmp_path / "second")
    assert (described["offline_id"], described["resume_strategy"]) == (key, "get_or_create")
    assert [step for _, step, _ in metrics_of(messages)] == [24, 24, 32, 32]
