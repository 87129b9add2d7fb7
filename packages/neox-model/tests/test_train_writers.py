"""Which writers a configuration opens, and where their numbers go."""

import sys

import pytest

from neox_launcher.errors import NeoXError
from neox_model.metrics.writers.jsonl import read_metrics
from neox_model.optional import MissingPackageError
from neox_model.train.position import START, Position
from neox_model.train.writers import open_writers
from support.settings import resolved_from


def write_one(settings, *, position=START):
    for writer in open_writers(resolved_from(settings, devices=2), position=position):
        writer.write({"loss/train": 2.5, "optimizer/learning_rate": 0.1}, position.iteration + 1)
        writer.close()


def monitor(folder):
    return {"enabled": True, "output_path": str(folder), "job_name": "job"}


def test_monitors_count_samples_where_the_loop_counts_iterations(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_one(
        {
            "log_dir": str(tmp_path / "log"),
            "csv_monitor": monitor(tmp_path / "csv"),
            "tensorboard": monitor(tmp_path / "tensorboard"),
        },
        position=Position(iteration=4, samples=12),
    )
    (record,) = read_metrics(tmp_path / "log/metrics.jsonl")
    assert record["iteration"] == 5
    # 12 before it was resumed, and an iteration of micro-batch 2 x accumulation 2 x 2 devices
    assert (tmp_path / "csv/job/Train_Samples_lr.csv").read_text() == "step,lr\n20,0.1\n"
    events = EventAccumulator(str(tmp_path / "tensorboard/job"))
    events.Reload()
    (event,) = events.Scalars("Train/Samples/train_loss")
    assert (event.step, event.value) == (20, 2.5)


def test_no_monitor_runs_without_being_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_one({"csv_monitor": {"job_name": "job"}, "wandb": {"project": "p"}, "comet": {"mode": "get"}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("block", "package"), [("wandb", "wandb"), ("comet", "comet_ml")])
def test_a_monitor_whose_package_is_missing_is_refused(monkeypatch, block, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=f"needs the package {package}"):
        write_one({block: {"enabled": True}})


def test_a_folder_that_cannot_be_made_is_told_before_training(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(NeoXError, match="metrics cannot be written"):
        write_one({"csv_monitor": monitor(tmp_path / "taken")})
