"""`wall_clock_breakdown`: the phases of an iteration add up, on every engine, and nothing else is printed."""

import csv
from pathlib import Path

import pytest

from neox_model.metrics.writers.jsonl import read_metrics
from neox_model.parallel.topology import create_groups
from neox_model.train.open_run import train_in
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

LAYOUTS = {
    "plain": {},
    "zero": {"zero_optimization": {"stage": 1}},
    "zero of DeepSpeed": {"engine": "deepspeed", "zero_optimization": {"stage": 1}},
    "pipeline": {"engine": "deepspeed", "pipe_parallel_size": 2, "precision": "bfloat16"},
    "torch pipeline": {"pipe_parallel_size": 2, "pipeline_schedule": "zero_bubble"},
}
PARTS = ("data", "forward", "backward_inner", "backward_allreduce", "step", "other")
DOCUMENTED = ("forward", "backward", "backward_inner", "backward_allreduce", "step")


def train_all(folder: str, data_path: str) -> None:
    for name, layout in LAYOUTS.items():
        place = Path(folder, name)
        settings = (
            SMALL_TRAINING
            | layout
            | {
                "data_path": data_path,
                "train_iters": 4,
                "log_interval": 2,
                "log_dir": str(place),
                "wall_clock_breakdown": True,
                "use_wandb": False,
                "csv_monitor": {"enabled": True, "output_path": str(place), "job_name": "csv"},
            }
        )
        resolved = resolved_from(settings, devices=2)
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        train_in(groups, resolved)


def test_the_phases_of_an_iteration_add_up_and_reach_the_monitors(tmp_path, capfd):
    run_ranks(train_all, size=2, folder=str(tmp_path), data_path=write_corpus(tmp_path), timeout_seconds=400)
    for name in LAYOUTS:
        lines = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "time/forward" in line]
        assert [line["iteration"] for line in lines] == [2, 4], name
        for line in lines:
            parts = [line.get(f"time/{part}", 0.0) for part in (*PARTS, "pipeline")]
            assert sum(parts) == pytest.approx(line["time/iteration"], rel=1e-6), name
            assert line["time/backward"] == pytest.approx(
                line["time/backward_inner"] + line["time/backward_allreduce"]
            )
            assert min(line[f"time/{part}"] for part in ("forward", "backward_inner", "step")) > 0, name
            # What is outside all phases is a few callbacks.
            assert 0 <= line["time/other"] < line["time/iteration"], name
        assert ("time/pipeline" in lines[0]) == ("pipeline" in name)
        for phase in DOCUMENTED:
            path = tmp_path / name / f"csv/Train_Samples_elapsed_time_ms_{phase}.csv"
            heading, *rows = csv.reader(path.open())
            assert heading == ["step", f"elapsed_time_ms_{phase}"]
            assert [float(row[1]) for row in rows] == [
                pytest.approx(1000 * line[f"time/{phase}"]) for line in lines
            ]
    shown = "".join(capfd.readouterr())
    assert "time (ms)" not in shown
