"""The command `neox-launch verify-resume` with real launches."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.checkpoint_edits import edit_tensors
from support.corpus import write_corpus

pytestmark = pytest.mark.sweep

LAUNCH = Path(sys.executable).with_name("neox-launch")
SETTINGS = """
num-layers: 2
hidden-size: 16
num-attention-heads: 2
seq-length: 16
max-position-embeddings: 16
hidden-dropout: 0.1
train-iters: 20
train-micro-batch-size-per-gpu: 2
tokenizer-type: CharLevelTokenizer
data-path: corpus
split: "100,0,0"
optimizer: {type: Adam, params: {lr: 0.01}}
save: checkpoints
load: checkpoints
save-interval: 2
log-dir: logs
eval-iters: 0
"""
SECONDS = 600
WITHOUT_DROPOUT = ("--set", "hidden-dropout=0", "--set", "attention-dropout=0")


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [LAUNCH, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return launch(folder, "verify-resume", "--config", "job.yml", *arguments)


def contents(folder: Path) -> dict[str, bytes]:
    files = [
        path for name in ("checkpoints", "logs") for path in (folder / name).rglob("*") if path.is_file()
    ]
    return {str(path): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a training that has kept its checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    (folder / "job.yml").write_text(SETTINGS)
    result = launch(folder, "--config", "job.yml", "--set", "exit-interval=4")
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def test_a_training_on_two_processes_agrees_and_touches_nothing(trained):
    before = contents(trained)
    result = verify(trained, "--steps", "2", "--set", "num-gpus=2", "--set", "train-batch-size=4")
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert "from global_step4" in result.stderr
    assert result.stdout.endswith("verdict: the resumed training agrees with the uninterrupted one\n")
    assert contents(trained) == before
    assert not list((trained / "checkpoints").glob(".verify-resume*"))


def test_tensor_parallel_ranks_resume_as_one_process(trained):
    sizes = ("--set", "num-gpus=2", "--set", "model-parallel-size=2", "--set", "load=null")
    alone = ("--resume-set", "num-gpus=1", "--resume-set", "model-parallel-size=1")
    result = verify(trained, "--steps", "2", *WITHOUT_DROPOUT, *sizes, *alone)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert "not compared: random streams start anew on other parallel sizes" in result.stdout


def test_kept_checkpoints_agree_and_a_changed_one_is_found(trained, tmp_path):
    result = verify(trained, "--from", "2", "--to", "4")
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert "losses" in result.stdout
    changed = tmp_path / "global_step4"
    shutil.copytree(trained / "checkpoints" / "global_step4", changed)
    edit_tensors(changed, lambda tensors: tensors["final_norm.weight"][3].add_(torch.tensor(0.5)))
    result = verify(trained, "--from", "2", "--to", str(changed))
    assert result.returncode == 1
    assert (
        "first difference: final weight final_norm.weight at iteration 4: 1 of 16 elements" in result.stdout
    )


def test_a_resumed_training_that_computes_something_else_is_found(trained):
    decay = "weight-decay=0.3"
    result = verify(trained, "--steps", "2", "--set", "load=null", "--resume-set", decay)
    assert result.returncode == 1
    assert "first difference: optimizer setting weight_decay of parameter group 0" in result.stdout
