"""The commands of docs/finetuning.md, from a model of Hugging Face to a served one, run as they are shown."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.hf_models import write_model
from support.launches import ENVIRONMENT
from support.served import serving

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("starlette")

DOCUMENT = Path(__file__).parents[2] / "docs" / "finetuning.md"
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
# What only makes the example small.
SMALLER = {"train-iters: 500": "train-iters: 4", "eval-iters: 10": "eval-iters: 1", "maximum-tokens: 64": ""}
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def section(title):
    """Return the blocks of a section: language and text, and the commands of consoles."""
    text = DOCUMENT.read_text().partition(f"### {title}\n")[2]
    text = re.split(r"^##", text, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_of(block):
    return re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE)


def environment():
    return os.environ | ENVIRONMENT | {"PATH": PATH}


def run(folder, command):
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def write_pairs(path, count):
    pairs = [
        {"prompt": f"def f{number}(x):\n", "response": f"    return x + {number}\n"}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


@pytest.fixture
def start(tmp_path):
    """Write the model and the texts that the document begins with."""
    write_model(tmp_path / "pythia-160m", "llama", SIZES | {"vocab_size": 280})
    write_pairs(tmp_path / "pairs.jsonl", 60)
    write_pairs(tmp_path / "valid.jsonl", 40)
    return tmp_path


@pytest.mark.slow
def test_the_path_from_a_model_of_hugging_face_to_a_server(start):
    outputs = {}
    for language, block in section("From a model of Hugging Face to adapters and back"):
        if language == "yaml":
            for given, smaller in SMALLER.items():
                assert given in block
                block = block.replace(given, smaller)
            (start / "adapters.yml").write_text(block)
        for command in commands_of(block) if language == "console" else ():
            if " serve " in command:
                assert_serves(start, command)
            else:
                outputs[command] = run(start, command)
    assert len(outputs) == 14
    assert "\nequal: 21 tensors\n" in outputs["neox-convert verify merged exported"]
    assert json.loads((start / "peft" / "adapter_config.json").read_text())["r"] == 8
    run(start, "neox-convert from-peft peft --base imported --output again")
    text = run(start, "neox-launch generate --config again/model.yml --prompt def --set maximum-tokens=4")
    assert "def" in text


def assert_serves(folder, command):
    program, name, *config = shlex.split(command)
    assert (program, name) == ("neox-launch", "serve")
    with serving(folder, config=config) as server:
        status, answer = server.complete(prompt="def f1(x):\n", max_tokens=4)
        assert status == 200, answer
        assert 0 < answer["usage"]["completion_tokens"] <= 4
