"""The command `neox-launch verify-resume` with real launches."""

import re
import subprocess
from pathlib import Path

import pytest

from support.corpus import write_corpus
from support.launches import launch, write_job
from support.refusals import shows
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.sweep

SETTINGS = SMALL_TRAINING | {
    "train_iters": 20,
    "data_path": "corpus",
    "save": "checkpoints",
    "load": "checkpoints",
    "save_interval": 2,
    "log_dir": "logs",
}
SECONDS = 600
WITHOUT_DROPOUT = ("--set", "hidden-dropout=0", "--set", "attention-dropout=0")


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return launch(folder, "verify-resume", "--config", "job.yml", *arguments, seconds=SECONDS)


def contents(folder: Path) -> dict[str, bytes]:
    files = [
        path for name in ("checkpoints", "logs") for path in (folder / name).rglob("*") if path.is_file()
    ]
    return {str(path): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Create a folder with a run that kept its checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    write_job(folder, SETTINGS)
    result = launch(folder, "--config", "job.yml", "--set", "exit-interval=4", seconds=SECONDS)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def test_a_training_on_two_processes_agrees_and_touches_nothing(trained):
    before = contents(trained)
    result = verify(trained, "--steps", "2", "--set", "num-gpus=2", "--set", "train-batch-size=4")
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert "from global_step4" in result.stderr
    assert result.stdout.endswith("verdict: the resumed run agrees with the uninterrupted one\n")
    assert contents(trained) == before
    assert not list((trained / "checkpoints").glob(".verify-resume*"))


def test_tensor_parallel_ranks_resume_as_one_process(trained):
    sizes = ("--set", "num-gpus=2", "--set", "model-parallel-size=2", "--set", "load=null")
    alone = ("--resume-set", "num-gpus=1", "--resume-set", "model-parallel-size=1")
    result = verify(trained, "--steps", "2", *WITHOUT_DROPOUT, *sizes, *alone)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert "random streams start" in result.stdout


def test_a_training_whose_momentum_changes_resumes_exactly(trained):
    params = "cycle_min_lr: 0.001, cycle_max_lr: 0.01, cycle_first_step_size: 3, cycle_second_step_size: 6"
    cycle = f"scheduler={{type: OneCycle, params: {{{params}}}}}"
    result = verify(trained, "--steps", "3", "--set", "load=null", "--set", cycle)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert re.search(r"\noptimizer settings +6 groups +agree\n", result.stdout)


def test_resumed_training_with_different_results_is_detected(trained):
    decay = "weight-decay=0.3"
    result = verify(trained, "--steps", "2", "--set", "load=null", "--resume-set", decay)
    assert result.returncode == 1
    assert shows(result.stdout, "weight_decay", "group 0")
