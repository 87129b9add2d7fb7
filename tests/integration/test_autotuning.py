"""Autotuning through real trainings: four trials on two CPU processes, and the same command once more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.corpus import write_corpus

pytestmark = pytest.mark.slow

LAUNCH = Path(sys.executable).with_name("neox-launch")
SETTINGS = """
num-layers: 1
hidden-size: 16
num-attention-heads: 2
seq-length: 16
max-position-embeddings: 16
train-iters: 1000
tokenizer-type: CharLevelTokenizer
data-path: corpus
split: "100,0,0"
num-gpus: 2
pipe-parallel-size: 1
train-micro-batch-size-per-gpu: 2
optimizer: {type: Adam, params: {lr: 0.001}}
save: checkpoints
save-interval: 1
autotuning: {enabled: true, num_tuning_micro_batch_sizes: 2, start_profile_step: 2, end_profile_step: 3}
"""
SECONDS = 400


def launch(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [LAUNCH, "--config", "job.yml"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_trials_find_the_best_and_are_not_run_twice(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "job.yml").write_text(SETTINGS)
    first = launch(tmp_path)
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
        iterations = [json.loads(line)["iteration"] for line in record.read_text().splitlines()]
        assert iterations == [1, 2, 3]
    assert not (tmp_path / "checkpoints").exists()
    stage, micro_batch = max(tried, key=lambda key: tried[key]["samples_per_second"])
    assert (
        f"zero_optimization: {{stage: {stage}}}\n  train-micro-batch-size-per-gpu: {micro_batch}"
        in first.stdout
    )

    second = launch(tmp_path)
    assert second.returncode == 0
    assert second.stdout.count("known from an earlier command") == 4
    assert "torch.distributed runs" not in second.stderr
