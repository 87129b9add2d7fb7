"""The model and the corpus of `make quickstart` over every backend: the losses of one host, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.cluster_job import Job
from support.cluster_tools import TOOLS

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sweep]

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yml"
COMMANDS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Return the settings of configs/quickstart.yml for 20 iterations; data as in tools/quickstart.mk."""
    folder = tmp_path_factory.mktemp("quickstart")
    corpus, tokenizer, prefix = folder / "stdlib.jsonl", folder / "tokenizer.json", folder / "stdlib"
    tokenize = ("--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer, "--append-eod")
    for command in (
        ("neox-data", "stdlib-corpus", corpus),
        ("neox-data", "train-tokenizer", "--input", corpus, "--vocab-size", "4096", "--output", tokenizer),
        ("preprocess_data", "--input", corpus, *tokenize, "--output-prefix", prefix),
    ):
        subprocess.run([COMMANDS / command[0], *command[1:]], check=True, capture_output=True)
    return yaml.safe_load(CONFIG.read_text()) | {
        "data-path": f"{prefix}_text_document",
        "vocab-file": str(tokenizer),
        "train-iters": 20,
        "eval-iters": 2,
        "log-interval": 1,
        "save": None,
        "load": None,
        "save-interval": None,
        "tensorboard-dir": None,
    }


@pytest.fixture(scope="module")
def losses_of_one_host(cluster, quickstart, tmp_path_factory):
    job = Job(cluster, tmp_path_factory.mktemp("local"), base=quickstart, num_gpus=2)
    result = job.run()
    assert result.code == 0, result.err
    assert len(job.losses) == 20
    return job.losses


@pytest.mark.parametrize("launcher", TOOLS, indirect=True)
def test_two_hosts_train_the_quickstart_model_as_one_does(
    cluster, tmp_path, quickstart, losses_of_one_host, launcher
):
    name, before = launcher
    hosts = ("worker-1 slots=1", "worker-2 slots=1")
    job = Job(cluster, tmp_path, *hosts, base=quickstart, launcher=name)
    result = job.run(before=before)
    assert result.code == 0, result.err
    assert job.losses == losses_of_one_host
