"""The record of a real training: start, evaluation, save and end, and a start that cannot be described."""

import os
from pathlib import Path
from typing import Any

from neox_model.checkpoint.contents import Manifest
from neox_model.metrics.writers.jsonl import read_records
from neox_model.report.page import render_page
from neox_model.report.reading import read_run
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

SETTINGS = SMALL_TRAINING | {
    "split": "80,20,0",
    "train_iters": 2,
    "log_interval": 1,
    "eval_interval": 2,
    "eval_iters": 1,
    "use_wandb": False,
}


def train_twice(folder: str, data_path: str) -> None:
    """Train with a relative save folder, then with a description that fails; runs in the rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    def fail(*args: Any, **named: Any) -> None:
        raise RuntimeError("no driver")

    os.chdir(folder)
    groups = create_groups(1, 1)
    settings = SETTINGS | {"data_path": data_path}
    open_run.train_in(
        groups, resolved_from(settings | {"log_dir": "whole", "save": "checkpoints", "save_interval": 2})
    )
    open_run.run_info = fail
    open_run.train_in(groups, resolved_from(settings | {"log_dir": "undescribed"}))


def events_of(folder: Path) -> list[tuple[str, int]]:
    return [
        (line["event"], line["iteration"])
        for line in read_records(folder / "metrics.jsonl")
        if "event" in line
    ]


def test_a_training_records_its_events_even_if_it_cannot_describe_itself(tmp_path):
    run_ranks(train_twice, size=1, folder=str(tmp_path), data_path=write_corpus(tmp_path))
    events = events_of(tmp_path / "whole")
    assert events[:2] == [("attempt", 0), ("start", 0)]
    assert {("evaluation", 2), ("save", 2)} <= set(events)
    assert events[-1] == ("end", 2)
    run = read_run(tmp_path / "whole")
    assert run.about["save"] == str(tmp_path / "checkpoints")
    assert [iteration for iteration, _ in run.checkpoints] == [2]
    assert run.about["config"]["train_iters"] == 2
    assert run.about["attention"] == {"global": "flash"}
    manifest = Manifest.read(tmp_path / "checkpoints" / "global_step2")
    assert manifest.config["attention_backends"] == {"global": "flash"}
    assert "all iterations were" in render_page([run])
    undescribed = events_of(tmp_path / "undescribed")
    assert "start" not in dict(undescribed)
    assert undescribed[-1] == ("end", 2)
