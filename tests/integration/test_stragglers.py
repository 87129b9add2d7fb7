"""`straggler_threshold` in whole runs on gloo: a slow rank is named, equal ranks are not."""

import socket
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from neox_model.metrics.writers.jsonl import read_metrics, read_records
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

SETTINGS = SMALL_TRAINING | {
    "train_iters": 5,
    "log_interval": 2,
    "straggler_threshold": 1.5,
    "use_wandb": False,
}
# Layout and the rank whose loss takes longer; None: each reading of the clock takes a second on every rank.
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "data": ({"wall_clock_breakdown": True}, 1),
    "data, bf16": ({"precision": "bfloat16"}, 0),
    "ZeRO 2, fp16": ({"zero_optimization": {"stage": 2}, "precision": "fp16"}, 1),
    "equal": ({}, None),
    "tensor": ({"model_parallel_size": 2}, 1),
    "pipeline": ({"pipe_parallel_size": 2}, 1),
}
FOUR = {
    "tensor and data": ({"model_parallel_size": 2}, 2),
    "pipeline and data": ({"pipe_parallel_size": 2, "precision": "bfloat16"}, 3),
}
NAMED = {
    "data": [1],
    "data, bf16": [0],
    "ZeRO 2, fp16": [1],
    "tensor and data": [2, 3],
    "pipeline and data": [3],
}


def train_all(folder: str, data_path: str, cases: dict[str, tuple[dict[str, Any], int | None]]) -> None:
    """Train every case; runs in each rank."""
    from neox_model.layers.lm_head import LMLoss
    from neox_model.metrics.compute_time import HOST_CLOCK, Clock
    from neox_model.parallel.topology import create_groups
    from neox_model.train.callbacks import stragglers
    from neox_model.train.open_run import train_in

    of_hidden = LMLoss.of_hidden
    for name, (layout, slow) in cases.items():

        def slowed(self, *args, slow=slow, **named):
            time.sleep(0.2 if torch.distributed.get_rank() == slow else 0.0)
            return of_hidden(self, *args, **named)

        LMLoss.of_hidden = slowed
        ticks = Clock(now=count().__next__, is_past=lambda now: True, seconds=lambda begin, end: end - begin)
        stragglers.HOST_CLOCK = HOST_CLOCK if slow is not None else ticks
        settings = SETTINGS | layout | {"data_path": data_path, "log_dir": str(Path(folder, name))}
        resolved = resolved_from(settings, devices=torch.distributed.get_world_size())
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        train_in(groups, resolved)


def check(folder: Path, name: str) -> None:
    record = folder / name / "metrics.jsonl"
    lines = [line for line in read_metrics(record) if "ranks/largest_memory_rank" in line]
    assert [line["iteration"] for line in lines] == [2, 4], name
    events = [line for line in read_records(record) if line.get("event") == "straggler"]
    assert lines[0]["ranks/largest_memory_bytes"] > 2**25
    assert [event["ranks"] for event in events] == ([NAMED[name]] if name in NAMED else []), name
    if name in NAMED:
        assert events[0]["hosts"] == [socket.gethostname()]
        assert events[0]["iteration"] == 2
        assert events[0]["seconds"] > 0.1
    elif name == "equal":
        assert [line["ranks/slowest_factor"] for line in lines] == [1.0, 1.0]
        assert lines[0]["ranks/slowest_seconds"] == lines[0]["ranks/median_seconds"] > 0
    else:
        assert "ranks/slowest_factor" not in lines[0]


def test_a_slow_rank_is_named_and_equal_ones_are_not(tmp_path):
    corpus = write_corpus(tmp_path)
    run_ranks(train_all, size=2, folder=str(tmp_path), data_path=corpus, cases=CASES, timeout_seconds=200)
    for name in CASES:
        check(tmp_path, name)


@pytest.mark.sweep
def test_a_slow_rank_is_named_among_four(tmp_path):
    corpus = write_corpus(tmp_path)
    run_ranks(train_all, size=4, folder=str(tmp_path), data_path=corpus, cases=FOUR, timeout_seconds=300)
    for name in FOUR:
        check(tmp_path, name)
