"""What Weights & Biases receives, read back from the files of an offline run."""

import json
import struct
from pathlib import Path

import pytest

from support.settings import resolved_from
from support.writers import writers_of

pytestmark = pytest.mark.slow

wandb = pytest.importorskip("wandb", reason="requires the package wandb; run: make sweep NAME=services")

BLOCK, WHOLE, LAST = 32768, 1, 4


def messages_of(path: Path):
    """Yield the messages in a file of an offline run, a log in LevelDB's format after a header of 7 bytes."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def offline_run(folder: Path):
    """Return the description of the only run in a folder, and its metrics by step."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    run, history = None, {}
    for data in messages_of(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        if kind == "history":
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            values = {name: json.loads(text) for name, text in items.items()}
            history[values.pop("_step")] = {n: v for n, v in values.items() if not n.startswith("_")}
    return run, history


def configuration_of(run):
    return {update.key or update.nested_key[0]: json.loads(update.value_json) for update in run.config.update}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return tmp_path


def write(settings, metrics):
    for writer in writers_of(resolved_from(settings)):
        for iteration, values in metrics.items():
            writer.write(values, iteration)
        writer.close()
    # Ends the package's own process, so that its files are whole.
    wandb.teardown()


def test_every_setting_and_metric_of_use_wandb_is_in_the_files_of_the_run(offline):
    settings = {
        "use_wandb": True,
        "wandb_project": "p",
        "wandb_group": "g",
        "wandb_team": "t",
        "wandb_run_name": "n",
        "wandb_host": "http://localhost:1",
    }
    write(settings, {1: {"loss/train": 2.5}, 2: {"loss/train": 1.5, "optimizer/learning_rate": 0.25}})
    run, history = offline_run(offline)
    assert (run.project, run.run_group, run.entity, run.display_name) == ("p", "g", "t", "n")
    assert configuration_of(run)["hidden_size"] == 24
    assert history == {1: {"loss/train": 2.5}, 2: {"loss/train": 1.5, "optimizer/learning_rate": 0.25}}


def test_the_monitor_has_deepspeeds_names_settings_and_samples(offline):
    settings = {"wandb": {"enabled": True, "project": "q", "group": "h", "team": "u"}, "use_wandb": False}
    write(settings, {1: {"loss/train": 2.5}, 2: {"optimizer/learning_rate": 0.25, "time/forward": 0.5}})
    run, history = offline_run(offline)
    assert (run.project, run.run_group, run.entity) == ("q", "h", "u")
    # Micro-batches of 2, accumulated twice.
    assert history == {
        4: {"Train/Samples/train_loss": 2.5},
        8: {"Train/Samples/lr": 0.25, "Train/Samples/elapsed_time_ms_forward": 500.0},
    }
