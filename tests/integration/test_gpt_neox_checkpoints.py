"""A checkpoint of GPT-NeoX is converted by the command, and its training continues or starts anew."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from neox_data.indexed import IndexedDatasetWriter
from neox_model.checkpoint.contents import Manifest
from neox_model.convert.checkpoints import Checkpoint
from support.hf_models import ENTRIES
from support.launches import launch
from support.neox_checkpoints import pythia, write_neox
from support.refusals import shows

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


def convert(folder, *arguments):
    command = [sys.executable, "-P", "-m", "neox_model.convert", "from-neox", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def settings(**values):
    return [part for name, value in values.items() for part in ("--set", f"{name.replace('_', '-')}={value}")]


def test_a_converted_training_continues_at_its_iteration_or_starts_anew(tmp_path):
    source = pythia()
    write_neox(tmp_path / "theirs", source, ranks=2)
    done = convert(tmp_path, "theirs", "--output", "imported")
    assert done.returncode == 0, done.stderr
    assert "states were not" in done.stderr
    assert shows(done.stdout, "GPT-NeoX, 43,904", "28 tensors")
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "corpus", dtype=np.uint16) as writer:
        for length in generator.integers(30, 120, size=200):
            writer.append(generator.integers(0, ENTRIES, size=length).astype(np.uint16))

    data = settings(data_path="corpus", split="80,10,10", eval_iters=1, save_interval=1, lr=0.01)
    again = settings(finetune="false", no_load_optim="true", no_load_rng="true", override_lr_scheduler="true")
    arguments = ("--config", "imported/model.yml", *data)
    done = launch(tmp_path, *arguments, *again, *settings(save="continued", train_iters=32), seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    continued = Manifest.read(tmp_path / "continued" / "global_step32")
    assert continued.iteration == 32
    # 120 samples before, and two iterations of one sample.
    assert continued.training["samples"] == 122

    done = launch(tmp_path, *arguments, *settings(save="anew", train_iters=1), seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = Checkpoint(tmp_path / "anew" / "global_step1")
    stored = source.layers[6]["final_linear.weight"]
    assert 0 < float((trained.whole("lm_head.weight") - stored).abs().max()) < 0.1
    assert not torch.equal(trained.whole("layers.0.norm1.bias"), source.layers[2]["input_layernorm.bias"])

    evaluation = settings(eval_results_prefix="scores", eval_data="corpus")
    done = launch(tmp_path, "evaluate", *arguments, *evaluation, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perplexity" in done.stdout + done.stderr
    prompts = settings(sample_input_file="prompts.txt", sample_output_file="texts.jsonl", temperature=0)
    (tmp_path / "prompts.txt").write_text("def f(x):\nreturn\n")
    length = settings(maximum_tokens=8)
    done = launch(tmp_path, "generate", "--config", "imported/model.yml", *prompts, *length, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [line["context"] for line in lines] == ["def f(x):", "return"]
    # Greedy ids are those of the model that was converted.
    tokenizer = Tokenizer.from_file(str(tmp_path / "imported" / "tokenizer.json"))
    for line in lines:
        ids = tokenizer.encode(line["context"]).ids
        whole = source.model.generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=0, pad_token_id=0
        )
        assert line["tokens"] == [each for each in whole[0, len(ids) :].tolist() if each != 0]
