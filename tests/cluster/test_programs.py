"""Evaluation and generation start on several hosts as training does, and say what one host says."""

import json

import pytest

from support.cluster_job import Job

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sweep]


@pytest.fixture(scope="module")
def trained(cluster, tmp_path_factory):
    """Run a job of two hosts that saves a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "prompts").write_text("abc\nxyz\n")
    settings = {
        "launcher": "ssh",
        "split": "80,10,10",
        "eval-iters": 2,
        "train-iters": 4,
        "save": str(folder / "saved"),
        "load": str(folder / "saved"),
        "save-interval": 4,
        "text-gen-type": "input-file",
        "sample-input-file": str(folder / "prompts"),
        "sample-output-file": str(folder / "samples"),
        "maximum-tokens": 6,
    }
    job = Job(cluster, folder, "worker-1 slots=1", "worker-2 slots=1", **settings)
    result = job.run()
    assert result.code == 0, result.err
    return job


ONE_HOST = ("--set", "hostfile=null", "--set", "num-gpus=2")


def test_an_evaluation_gives_the_same_losses(trained):
    results = [trained.run("evaluate", *options) for options in ((), ONE_HOST)]
    assert [result.code for result in results] == [0, 0], results
    assert results[0].out == results[1].out
    assert "loss" in results[0].out


def test_a_generation_gives_the_same_texts(trained):
    """The first worker of each host holds half of the model."""
    samples = trained.folder / "samples"
    texts = []
    for options in ((), ONE_HOST):
        result = trained.run("generate", "--set", "model-parallel-size=2", *options)
        assert result.code == 0, result.err
        texts.append([json.loads(line)["text"] for line in samples.read_text().splitlines()])
        samples.unlink()
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
