"""The z-loss in whole trainings: logged by itself, the same on every layout, and not in the other losses."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

SETTINGS: dict[str, Any] = SMALL_TRAINING | {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": 3,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": None,
    "log_interval": 1,
    "eval_iters": 1,
    "eval_interval": 3,
    "init_method_std": 0.2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "weight_decay": 0.0,
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"model_parallel_size": 2},
    "pipeline": {"engine": "deepspeed", "pipe_parallel_size": 2},
    "torch pipeline": {"pipe_parallel_size": 2, "pipeline_schedule": "zero_bubble"},
    "ZeRO 3": {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True},
}


def train(folder: str, data_path: str, runs: dict[str, dict[str, Any]]) -> None:
    """Train with each settings, one after another in the same processes; runs in every rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    for name, changes in runs.items():
        settings = SETTINGS | {"data_path": data_path, "log_dir": str(Path(folder, name))} | changes
        resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
        train_in(create_groups(resolved.run.layout.tensor, resolved.run.layout.stages), resolved)


def logged(folder: Path, name: str) -> list[float]:
    """Return all values of a metric, in the order of the iterations."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("z_loss")
    runs = {
        "off": {},
        "on": {"z_loss": 0.05},
        "fp16": {"z_loss": 0.05, "fp16": {"enabled": True, "loss_scale": 64}},
    }
    run_ranks(train, size=1, runs=runs, folder=str(folder), data_path=write_corpus(folder))
    return folder


def test_the_losses_are_without_it_and_it_is_logged_by_itself(folder: Path) -> None:
    losses, without = logged(folder / "on", "loss/train"), logged(folder / "off", "loss/train")
    terms = logged(folder / "on", "loss/z_loss")
    assert logged(folder / "off", "loss/z_loss") == []
    assert losses[0] == without[0]
    assert losses[1] != without[1]
    # About the logarithm of the number of entries, squared.
    entries = 64
    assert len(terms) == 3
    assert 0.25 * 0.05 * math.log(entries) ** 2 < terms[0] < 4 * 0.05 * math.log(entries) ** 2
    assert terms[2] < terms[0]


def test_in_float16_it_is_the_same_to_rounding(folder: Path) -> None:
    for name in ("loss/train", "loss/z_loss"):
        assert logged(folder / "fp16", name) == pytest.approx(logged(folder / "on", name), rel=5e-3)


@pytest.mark.slow
def test_every_layout_logs_the_same(folder: Path) -> None:
    runs = {name: settings | {"z_loss": 0.05} for name, settings in TWO_RANKS.items()}
    run_ranks(train, size=2, runs=runs, folder=str(folder), data_path=write_corpus(folder))
    for name in TWO_RANKS:
        for metric in ("loss/train", "loss/z_loss", "loss/validation"):
            expected = logged(folder / "on", metric)
            assert logged(folder / name, metric) == pytest.approx(expected, rel=1e-4), (name, metric)
