"""Autotuning through real trainings: four trials on two CPU processes, and the same command once more."""

import json

import pytest

from neox_model.metrics.writers.jsonl import read_metrics
from support.corpus import write_corpus
from support.launches import launch, write_job
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.slow

SETTINGS = SMALL_TRAINING | {
    "num_layers": 1,
    "hidden_dropout": 0,
    "train_iters": 1000,
    "data_path": "corpus",
    "num_gpus": 2,
    "engine": "deepspeed",
    "pipe_parallel_size": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "save": "checkpoints",
    "save_interval": 1,
    "autotuning": {
        "enabled": True,
        "num_tuning_micro_batch_sizes": 2,
        "start_profile_step": 2,
        "end_profile_step": 3,
    },
}
SECONDS = 400


def test_trials_find_the_best_and_are_not_run_twice(tmp_path):
    write_corpus(tmp_path)
    write_job(tmp_path, SETTINGS)
    first = launch(tmp_path, "--config", "job.yml", seconds=SECONDS)
    assert first.returncode == 0, first.stderr[-3000:]
    results = json.loads((tmp_path / "autotuning_results/results.json").read_text())
    tried = {
        (result["experiment"]["zero_stage"], result["experiment"]["micro_batch"]): result
        for result in results
    }
    assert set(tried) == {(0, 2), (0, 4), (1, 2), (1, 4)}
    assert {result["status"] for result in results} == {"measured"}
    for (_, micro_batch), result in tried.items():
        assert result["samples_per_second"] == pytest.approx(2 * micro_batch / result["seconds"])
        record = tmp_path / "autotuning_exps" / result["name"] / "metrics.jsonl"
        iterations = [line["iteration"] for line in read_metrics(record)]
        assert iterations == [1, 2, 3]
    assert not (tmp_path / "checkpoints").exists()
    stage, micro_batch = max(tried, key=lambda key: tried[key]["samples_per_second"])
    assert (
        f"zero_optimization: {{stage: {stage}}}\n  train-micro-batch-size-per-gpu: {micro_batch}"
        in first.stdout
    )

    second = launch(tmp_path, "--config", "job.yml", seconds=SECONDS)
    assert second.returncode == 0
    assert second.stdout.count("from an earlier run") == 4
    assert "torch.distributed runs" not in second.stderr
