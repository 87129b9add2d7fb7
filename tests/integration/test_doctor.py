"""`neox-launch doctor` with real workers on this machine."""

import re

import pytest

from support.launches import launch, write_job
from support.refusals import shows
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.slow


def test_the_workers_of_this_machine_join_and_measure_their_connection(tmp_path):
    job = write_job(tmp_path, SMALL_TRAINING | {"attention_dropout": 0.0, "num_gpus": 2, "train_iters": 1})
    done = launch(tmp_path, "doctor", "--config", str(job), seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shows(done.stdout, "1 host", "2 workers")
    assert "GB/s per link" in done.stdout
    assert re.search(r"^attention backend +ok +flash \(global layers\)$", done.stdout, re.MULTILINE)
    assert re.search(r"^cudnn +ok ", done.stdout, re.MULTILINE)
    assert re.search(r"^contracts +ok +\d+ checks passed with torch ", done.stdout, re.MULTILINE)
    assert "can run the" in done.stdout
