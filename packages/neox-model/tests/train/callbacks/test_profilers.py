"""Profilers in runs of two ranks, on plain and pipeline engines."""

import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import resolved_from

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "tokenizer_type": "CharLevelTokenizer",
    "make_vocab_size_divisible_by": 19,
    "train_iters": 4,
    "log_interval": 2,
    "eval_iters": 1,
    "eval_interval": 2,
    "profile": True,
    "profile_step_start": 2,
    "profile_step_stop": 3,
    "memory_profiling": True,
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 3, "detailed": False},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"bf16": {"enabled": True}},
    "tensor": {"model_parallel_size": 2},
    "pipeline": {"pipe_parallel_size": 2, "fp16": {"enabled": True}},
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
}


def train(folder: str, data_path: str) -> None:
    """Train each layout, one after another in the same processes; runs in every rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    root = logging.getLogger("neox_model")
    root.setLevel(logging.INFO)
    for name in LAYOUTS:
        path = Path(folder, name)
        settings = SETTINGS | LAYOUTS[name] | {"data_path": data_path, "log_dir": str(path)}
        settings["memory_profiling_path"] = str(path / "memory")
        resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        path.mkdir(exist_ok=True)
        handler = logging.FileHandler(path / f"log-{groups.world.rank}.txt")
        root.addHandler(handler)
        train_in(groups, resolved)
        root.removeHandler(handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profilers")
    run_ranks(train, size=2, timeout_seconds=300, folder=str(folder), data_path=write_corpus(folder))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_traces_the_operators_and_allocations_of_the_iterations(folder, layout, rank):
    name = f"rank-{rank:05d}.iterations-2-3.pt.trace.json.gz"
    trace = (folder / layout / "profile" / name).read_bytes()
    assert (folder / layout / "memory" / name).read_bytes()
    record = json.loads(gzip.decompress(trace))
    assert record["distributedInfo"]["rank"] == rank
    names = [event["name"] for event in record["traceEvents"]]
    assert [each for each in names if each.startswith("iteration ")] == ["iteration 2", "iteration 3"]
    assert any("Backward" in each for each in names)
    assert "[memory]" in names
    assert len(list((folder / layout / "profile").iterdir())) == 2


OPERATIONS = {
    "data": ("all_reduce", "data (2)"),
    "tensor": ("all_reduce", "model (2)"),
    "pipeline": ("send", "pipe (2)"),
    "ZeRO 3": ("all_gather_into_tensor", "data (2)"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_logs_the_operations_of_each_group_at_every_interval_and_at_the_end(folder, layout):
    tables = (folder / layout / "log-0.txt").read_text().split("collective operations of rank 0 ")[1:]
    assert [table.splitlines()[0] for table in tables] == ["to iteration 2:", "to iteration 4:", "in all:"]
    operation, group = OPERATIONS[layout]
    rows = [
        [row for row in table.splitlines() if row.startswith(f"{operation} ") and group in row]
        for table in tables
    ]
    calls = [int(row.partition(")")[2].split()[0].replace(",", "")) for (row,) in rows]
    assert 0 < calls[0] < calls[1] <= calls[2]
    log = (folder / layout / "log-1.txt").read_text()
    assert "collective operations of rank" not in log
    assert "bytes in" in log


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_logs_the_operations_of_every_stage_once_and_what_the_formula_gives(folder, layout):
    log = (folder / layout / "log-0.txt").read_text()
    assert log.count("FLOPs of iteration 3: ") == log.count("FLOPs of iteration ") == 1
    report = log.partition("FLOPs of iteration 3: ")[2]
    ratio = float(report.partition("counted / formula: ")[2].partition(")")[0])
    # Attention computes its scores again in the backward pass.
    assert 1.0 < ratio < 1.05
    assert [f"stage {stage}, rank" in report for stage in (0, 1)] == [True, layout == "pipeline"]
    assert "FLOPs" not in (folder / layout / "log-1.txt").read_text()
