"""A model of transformers is imported, trained, evaluated, generates text, and is exported at the end."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from neox_data.indexed import IndexedDatasetWriter
from neox_model.convert.weights import WeightFiles
from support.hf_models import ENTRIES, write_model
from support.launches import launch

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

SETTINGS = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "sliding_window": 8,
    "vocab_size": ENTRIES,
}


def convert(folder, *arguments):
    command = [sys.executable, "-P", "-m", "neox_model.convert", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def write_tokens(folder):
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus", dtype=np.uint16) as writer:
        for length in generator.integers(30, 120, size=60):
            writer.append(generator.integers(0, ENTRIES, size=length).astype(np.uint16))


def test_an_imported_model_trains_evaluates_generates_and_is_exported(tmp_path):
    write_model(tmp_path / "theirs", "mistral", SETTINGS)
    done = convert(tmp_path, "from-hf", "theirs", "--output", "imported")
    assert done.returncode == 0, done.stderr
    write_tokens(tmp_path)
    data = ("--set", "data-path=corpus", "--set", "split=80,10,10", "--set", "eval-iters=2")
    training = (
        "--set",
        "train-iters=3",
        "--set",
        "save=runs",
        "--set",
        "save-interval=3",
        "--set",
        "lr=0.01",
    )
    arguments = ("--config", "imported/model.yml", *data)
    done = launch(tmp_path, *arguments, *training, "--hf-export-at-end", "exported", seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs, exported = WeightFiles(tmp_path / "theirs"), WeightFiles(tmp_path / "exported")
    assert theirs.tensors.keys() == exported.tensors.keys()
    for name, stored in theirs.tensors.items():
        change = float((theirs.whole(name) - exported.whole(name)).abs().max())
        assert 0 < change < 0.1, name
        assert exported.tensors[name].dtype == torch.float32
        assert exported.tensors[name].shape == stored.shape
    done = launch(tmp_path, "evaluate", *arguments, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    prompts = ("--set", "sample-input-file=prompts.txt", "--set", "sample-output-file=texts.jsonl")
    (tmp_path / "prompts.txt").write_text("def f(x):\nreturn\n")
    greedy = ("--set", "temperature=0", "--set", "maximum-tokens=12")
    done = launch(tmp_path, "generate", *arguments, *prompts, *greedy, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [line["context"] for line in lines] == ["def f(x):", "return"]
    done = convert(tmp_path, "verify", "exported", "runs")
    assert done.returncode == 0, done.stderr
    done = convert(tmp_path, "verify", "imported", "runs")
    assert done.returncode == 1
    assert "values differ" in done.stdout


def test_an_export_that_is_impossible_is_refused_at_the_start(tmp_path):
    (tmp_path / "job.yml").write_text(
        json.dumps(
            {
                "num-layers": 1,
                "hidden-size": 16,
                "num-attention-heads": 2,
                "max-position-embeddings": 16,
                "tokenizer-type": "CharLevelTokenizer",
                "train-micro-batch-size-per-gpu": 1,
                "train-iters": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
                "save": "runs",
                "save-interval": 2,
                "data-path": "corpus",
                "split": "100,0,0",
                "norm": "scalenorm",
                "hf-export": "exported",
            }
        )
    )
    write_tokens(tmp_path)
    done = launch(tmp_path, "--config", "job.yml", seconds=300)
    assert done.returncode != 0
    assert "hf-export" in done.stderr
    assert "norm: scalenorm" in done.stderr
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").glob("global_step*"))
