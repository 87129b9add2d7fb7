"""Checkpoints at listed iterations and by time, in trainings of two ranks whose clocks disagree.

Those of iteration 0 contain the same model on every layout, which `neox-checkpoint diff` confirms.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    checkpoint_name,
    complete_checkpoints,
    iteration_of,
)
from neox_model.checkpoint.contents import Manifest
from neox_model.inspection.cli import main
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero2": {"zero_optimization": {"stage": 2}},
    "pipeline": {"pipe_parallel_size": 2, "gradient_accumulation_steps": 2},
}
# Due in every third reading of the clock: after 3 iterations without another save.
TIMED = {"save_interval_minutes": 3.0, "extra_save_iters": [5, 0]}


class Ticks:
    """A clock that each reading advances by the same time."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self._seconds
        return self.now


def train_each(trainings: list[dict[str, Any]], resumed_from: str) -> None:
    """Train each in the same two processes; the clock of rank 1 runs an hour where rank 0's runs a minute.

    Args:
        trainings: settings; `start` is the iteration in `resumed_from` that the run resumes from.
        resumed_from: folder of checkpoints.
    """
    from torch import distributed

    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run
    from neox_model.train.callbacks import checkpoint

    seconds = (60.0, 3600.0)[int(os.environ["RANK"])]
    for settings in trainings:
        start = settings.pop("start", None)
        if start is not None:
            (Path(resumed_from) / LATEST).write_text(checkpoint_name(start))
            distributed.barrier()
            settings["load"] = resumed_from
        resolved = resolved_from(SMALL_TRAINING | {"train_iters": 10} | settings, devices=2)
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        with patch.object(checkpoint, "SaveClock", partial(checkpoint.SaveClock, now=Ticks(seconds))):
            open_run.train_in(groups, resolved)
        distributed.barrier()


def saved_in(folder: Path) -> list[int | None]:
    return [iteration_of(path.name) for path in complete_checkpoints(folder)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_save_by_the_clock_of_rank_0_and_each_checkpoint_resumes_bit_for_bit(
    tmp_path, corpus, layout
):
    folders = {name: tmp_path / name for name in ("whole", "kept", "plain", "from 0", "from 3")}
    base = {"data_path": corpus, **LAYOUTS[layout]}
    timed = {**base, **TIMED}
    trainings = [
        {**timed, "save": str(folders["whole"])},
        {**timed, "save": str(folders["kept"]), "keep_last_n_checkpoints": 2},
        {**base, "save": str(folders["plain"]), "save_interval": 100},
        {**timed, "save": str(folders["from 0"]), "start": 0},
        {**timed, "save": str(folders["from 3"]), "start": 3},
        {**timed, "save": str(folders["whole"]), "start": 0},
    ]
    run_ranks(train_each, size=2, trainings=trainings, resumed_from=str(folders["whole"]))
    # By time at 3; listed at 5, which starts the clock anew; by time at 8; the end.
    assert {name: saved_in(folder) for name, folder in folders.items()} == {
        "whole": [0, 3, 5, 8, 10],
        "kept": [8, 10],
        "plain": [10],
        # Iteration 0 is saved by every run that starts there, unless it is in that folder already.
        "from 0": [0, 3, 5, 8, 10],
        "from 3": [5, 8, 10],
    }
    for folder in folders.values():
        result = CliRunner().invoke(main, ["verify", str(folder), "--all"])
        assert result.exit_code == 0, result.stdout
    times = [
        (folders[name] / checkpoint_name(iteration) / MANIFEST).stat().st_mtime
        for name, iteration in (("whole", 0), ("plain", 10), ("whole", 3))
    ]
    assert times == sorted(set(times))
    last = {name: Manifest.read(folder / checkpoint_name(10)).tensors for name, folder in folders.items()}
    assert [name for name, tensors in last.items() if tensors != last["plain"]] == []


def test_the_model_of_iteration_0_is_the_same_on_every_layout(tmp_path, corpus):
    layouts = {**LAYOUTS, "tensor": {"model_parallel_size": 2}}
    sizes = {
        name: {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 1}
        for name, micro in (("zero2", 2), ("pipeline", 4), ("tensor", 4))
    }
    once = {"data_path": corpus, "train_iters": 1, "extra_save_iters": [0], "hidden_dropout": 0.0}
    trainings = [
        {**once, **layout, "train_batch_size": 4, "save": str(tmp_path / name)} | sizes[name]
        for name, layout in layouts.items()
    ]
    run_ranks(train_each, size=2, trainings=trainings, resumed_from="")
    first = tmp_path / "zero2"
    for name in layouts:
        words = ["diff", str(first / "global_step0"), str(tmp_path / name / "global_step0"), "--json"]
        result = CliRunner().invoke(main, words)
        found = json.loads(result.stdout)
        assert (result.exit_code, found["is_equal"]) == (0, True), result.stdout
        assert len([each for each in found["tensors"] if each["kind"] == "weights"]) == 28
    words = ["diff", str(first / "global_step0"), str(first / "global_step1"), "--json"]
    update = json.loads(CliRunner().invoke(main, words).stdout)
    assert min(each["relative_norm"] for each in update["tensors"] if each["kind"] == "weights") > 1e-4
    assert update["counters"]["iteration"] == [0, 1]
