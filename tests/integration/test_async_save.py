"""Asynchronous saves write what synchronous ones write, on every layout and in every precision."""

import json
from pathlib import Path
from typing import Any

import pytest

from neox_config.facts.checkpoints import LATEST, MANIFEST, checkpoint_name, complete_checkpoints
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

ACCUMULATES = {"gradient_accumulation_steps": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"model_parallel_size": 2, "precision": "bfloat16"},
    "pipeline": {"pipe_parallel_size": 2, "precision": "fp16", **ACCUMULATES},
    "zero1": {"zero_optimization": {"stage": 1}, "precision": "bfloat16"},
    "zero2": {"zero_optimization": {"stage": 2}, "precision": "fp16"},
    "zero3": {"zero_optimization": {"stage": 3}, "precision": "bfloat16"},
    "tensor and zero1": {
        "model_parallel_size": 2,
        "zero_optimization": {"stage": 1},
        "precision": "fp16",
    },
    "pipeline in bfloat16": {"pipe_parallel_size": 2, "precision": "bfloat16", **ACCUMULATES},
}
FAST = ("zero1",)
ITERATIONS, MIDDLE = 6, 2


def train_each(folder: str, corpus: str, layout: dict[str, Any]) -> None:
    """Train with synchronous and with asynchronous saves, and resume from one of the latter."""
    from torch import distributed

    from neox_model.parallel.topology import create_groups
    from neox_model.train import run

    base = SMALL_TRAINING | layout | {"data_path": corpus, "train_iters": ITERATIONS, "save_interval": 2}
    trainings = {
        "synchronous": {},
        "asynchronous": {"async_save": True},
        "resumed": {"async_save": True, "load": f"{folder}/asynchronous"},
    }
    for name, others in trainings.items():
        if "load" in others:
            (Path(folder) / "asynchronous" / LATEST).write_text(checkpoint_name(MIDDLE))
            distributed.barrier()
        resolved = resolved_from(base | others | {"save": f"{folder}/{name}"}, devices=2)
        groups = create_groups(resolved.derived.model_parallel_size, resolved.derived.pipe_parallel_size)
        run.train_in(groups, resolved)
        distributed.barrier()


def shards_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the bytes of the shards of all checkpoints in a folder."""
    return {
        each.name: {path.name: path.read_bytes() for path in each.iterdir() if path.name != MANIFEST}
        for each in complete_checkpoints(folder)
    }


def manifest_of(folder: Path, iteration: int) -> dict[str, Any]:
    """Return a manifest without the parameters, which name the folder."""
    contents = json.loads((folder / checkpoint_name(iteration) / MANIFEST).read_text())["contents"]
    return {name: value for name, value in contents.items() if name != "config"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.sweep, id=name) for name in LAYOUTS],
)
def test_the_files_are_equal_and_resume_bit_for_bit(tmp_path, layout):
    corpus = write_corpus(tmp_path)
    run_ranks(train_each, size=2, folder=str(tmp_path), corpus=corpus, layout=LAYOUTS[layout])
    expected = shards_of(tmp_path / "synchronous")
    assert list(expected) == ["global_step2", "global_step4", "global_step6"]
    assert shards_of(tmp_path / "asynchronous") == expected
    del expected["global_step2"]
    assert shards_of(tmp_path / "resumed") == expected
    for iteration in (4, 6):
        manifests = [
            manifest_of(tmp_path / name, iteration) for name in ("synchronous", "asynchronous", "resumed")
        ]
        assert manifests[1:] == manifests[:1] * 2
    assert not list(tmp_path.glob("*/.*.saving"))
