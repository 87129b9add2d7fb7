"""A training with a constant learning rate is continued with other decays than it was started with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from neox_config.facts.checkpoints import checkpoint_name
from neox_model.checkpoint.errors import CheckpointError
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.trainings import tensors_of, train_all

SETTINGS: dict[str, Any] = {
    "lr_decay_style": "wsd",
    "warmup_iters": 1,
    "lr_wsd_decay_iters": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
}
BRANCH: dict[str, Any] = {"train_iters": 6}
AGAIN: dict[str, Any] = {"train_iters": 10, "lr_wsd_decays": [6]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branches")

    def at(name: str, iteration: int) -> dict[str, str]:
        return {"load": str(folder / name / checkpoint_name(iteration))}

    runs: dict[str, dict[str, Any]] = {
        "long": {"train_iters": 12},
        "branch": BRANCH | at("long", 4),
        "decayed from the start": BRANCH,
        "continued": AGAIN | at("branch", 6),
        "repeated from the start": AGAIN,
    }
    run_ranks(
        train_all,
        size=1,
        folder=str(folder),
        corpus=write_corpus(folder),
        trainings={name: SETTINGS | given for name, given in runs.items()},
        timeout_seconds=300,
    )
    return folder


def differing(one: Path, other: Path, iteration: int) -> list[str]:
    found, right = tensors_of(one, iteration), tensors_of(other, iteration)
    assert found.keys() == right.keys()
    return [name for name, values in right.items() if not torch.equal(values, found[name])]


def test_a_branch_is_the_run_that_decays_there(folder):
    assert differing(folder / "branch", folder / "decayed from the start", 6) == []
    assert differing(folder / "branch", folder / "long", 6) != []


def test_a_decayed_run_continues_as_the_run_with_both_decays(folder):
    assert differing(folder / "continued", folder / "repeated from the start", 10) == []


def test_a_checkpoint_within_a_decay_is_not_continued_at_the_constant_rate(folder, tmp_path):
    load = str(folder / "long" / checkpoint_name(12))
    settings = SETTINGS | {"train_iters": 20, "load": load, "data_path": write_corpus(folder)}
    with pytest.raises(CheckpointError, match="schedule differs"):
        train_here(settings | {"save": str(tmp_path), "save_interval": 100})


def train_here(settings: dict[str, Any]) -> None:
    from neox_model.parallel.groups import SINGLE_PROCESS
    from neox_model.train.open_run import train_in
    from support.settings import SMALL_TRAINING, resolved_from

    train_in(SINGLE_PROCESS, resolved_from(SMALL_TRAINING | settings))
