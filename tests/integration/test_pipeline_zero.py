"""Checkpoints of pipelines with ZeRO: resumed to the last bit, and read by other layouts and engines."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from neox_config.facts.checkpoints import LATEST, MANIFEST, checkpoint_name
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

SETTINGS = SMALL_TRAINING | {
    "num_layers": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "no_weight_tying": False,
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": None,
    "save_interval": 2,
    "log_interval": 1,
}


def _pipeline(stage: int, **more: Any) -> dict[str, Any]:
    return {"pipe_parallel_size": 2, "engine": "torch", "zero_optimization": {"stage": stage}, **more}


# Each resumes the checkpoint of the one before it.
CHAIN: dict[str, dict[str, Any]] = {
    "torch, ZeRO 1": _pipeline(1),
    "DeepSpeed, ZeRO 1": {"pipe_parallel_size": 2, "engine": "deepspeed", "zero_optimization": {"stage": 1}},
    "torch, ZeRO 3, interleaved": _pipeline(3, pipeline_schedule="interleaved"),
    "data parallel, ZeRO 2": {"engine": "torch", "zero_optimization": {"stage": 2}},
    "torch, ZeRO 2, ZBV": _pipeline(2, pipeline_schedule="zbv"),
    "tensor parallel": {"model_parallel_size": 2},
    "torch, ZeRO 1, zero bubble": _pipeline(1, pipeline_schedule="zero_bubble"),
}
EACH = 2
# Resumed on the same layout, with dropout.
RESUMED: dict[str, dict[str, Any]] = {
    "fp32": _pipeline(1),
    "bf16": _pipeline(2, pipeline_schedule="zero_bubble", precision="bfloat16"),
    "fp16": _pipeline(3, pipeline_schedule="interleaved", precision="fp16"),
}


def train(folder: Path, **more: Any) -> None:
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run
    from support.worlds import forget_deepspeeds_world

    forget_deepspeeds_world()
    files = {"data_path": str(folder.parent / "corpus"), "save": str(folder), "log_dir": str(folder)}
    resolved = resolved_from(SETTINGS | files | more, devices=int(os.environ["WORLD_SIZE"]))
    groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    open_run.train_in(groups, resolved)


def train_in_turn(folder: str) -> None:
    """Train in one layout, and, two updates each, in all of them; runs in every rank."""
    updates = EACH * len(CHAIN)
    train(Path(folder, "whole"), **CHAIN["torch, ZeRO 1"], train_iters=updates)
    parts = Path(folder, "parts")
    for number, settings in enumerate(CHAIN.values()):
        loads = {"load": str(parts)} if number else {}
        train(parts, **settings, **loads, train_iters=updates, exit_interval=EACH)


def train_and_resume(folder: str) -> None:
    """Train four updates, and the last two again, in each precision; runs in every rank."""
    from torch import distributed

    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "train_iters": 4}
    for name, settings in RESUMED.items():
        whole, resumed = Path(folder, f"{name}-whole"), Path(folder, f"{name}-resumed")
        train(whole, **settings, **dropout)
        if distributed.get_rank() == 0:
            (whole / LATEST).write_text(checkpoint_name(2))
        distributed.barrier()
        train(resumed, **settings, **dropout, load=str(whole))


def losses_of(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line["loss/train"] for line in lines if "loss/train" in line}


def test_each_layout_continues_the_training_of_the_one_before(tmp_path):
    write_corpus(tmp_path)
    run_ranks(train_in_turn, size=4, folder=str(tmp_path), timeout_seconds=600)
    whole, parts = losses_of(tmp_path / "whole"), losses_of(tmp_path / "parts")
    assert list(whole) == list(range(1, EACH * len(CHAIN) + 1))
    assert whole[1] - whole[EACH * len(CHAIN)] > 0.05
    assert parts == pytest.approx(whole, abs=1e-5)


def shards_of(folder: Path, iteration: int) -> dict[str, bytes]:
    files = (folder / checkpoint_name(iteration)).iterdir()
    return {path.name: path.read_bytes() for path in files if path.name != MANIFEST}


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path):
    write_corpus(tmp_path)
    run_ranks(train_and_resume, size=4, folder=str(tmp_path), timeout_seconds=600)
    for name in RESUMED:
        whole, resumed = (shards_of(tmp_path / f"{name}-{each}", 4) for each in ("whole", "resumed"))
        assert len(whole) == 4
        assert resumed == whole, name
