"""The commands of documents run as they are shown, in order, and print what is shown.

Each document runs in a new folder with a copy of `configs`; `make test-recipes` runs these tests.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.documents import RUN, Block, blocks_of, is_run, read, shows
from support.hf_models import write_model
from support.launches import shell
from support.served import serving
from support.sources import ROOT

pytestmark = pytest.mark.recipe

SECONDS = 900


def nothing(folder: Path) -> None:
    """A document that begins with nothing."""


@dataclass(frozen=True)
class Stage:
    """How a document is run.

    Args:
        requires: optional packages; without them the test is skipped.
        prepare: writes the files that the reader has at the beginning.
        smaller: what is replaced in files and commands, so that they take less time.
        then: checks of the folder and of the output of each command.
    """

    requires: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = nothing
    smaller: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[Path, Mapping[str, str]], None] = lambda folder, outputs: None


def run(folder: Path, command: str) -> str:
    done = shell(folder, command, seconds=SECONDS)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def run_block(folder: Path, block: Block) -> dict[str, str]:
    """Run the commands of a block; a server answers those that follow it, and ends with exit code 0."""
    outputs = {}
    commands = block.commands
    for number, (command, shown) in enumerate(commands):
        if command.startswith("neox-launch serve"):
            outputs[command] = "serving"
            return outputs | run_served(folder, command, commands[number + 1 :])
        outputs[command] = run(folder, command)
        if shown.strip():
            assert shows(shown, outputs[command]), f"{command}\n{outputs[command]}"
    return outputs


def run_served(folder: Path, command: str, requests: list[tuple[str, str]]) -> dict[str, str]:
    outputs = {}
    with serving(folder, config=shlex.split(command)[2:]) as server:
        status, answer = server.complete(prompt="a", max_tokens=4)
        assert status == 200, answer
        assert 0 < answer["usage"]["completion_tokens"] <= 4
        for request, shown in requests:
            assert ":8000" in request
            outputs[request] = run(folder, request.replace(":8000", f":{server.port}"))
            assert not shown.strip() or shows(shown, outputs[request]), outputs[request]
        assert server.stop() == 0
    return outputs


def write_pairs(path: Path, count: int) -> None:
    pairs = [
        {"prompt": f"def f{number}(x):\n", "response": f"    return x + {number}\n"}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def write_chats(path: Path, count: int) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}."}]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def write_model_and_pairs(folder: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "vocab_size": 280,
    }
    write_model(folder / "pythia-160m", "llama", sizes)
    write_pairs(folder / "pairs.jsonl", 60)
    write_pairs(folder / "valid.jsonl", 40)
    write_chats(folder / "chats.jsonl", 60)
    write_chats(folder / "valid-chats.jsonl", 40)


def write_model_and_texts(folder: Path) -> None:
    write_model_and_pairs(folder)
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    texts = (json.dumps({"text": pair["prompt"] + pair["response"]}) + "\n" for pair in pairs)
    (folder / "texts.jsonl").write_text("".join(texts))


def the_exported_model_learned(folder: Path, outputs: Mapping[str, str]) -> None:
    weights = [folder / name / "model.safetensors" for name in ("pythia-160m", "exported")]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    assert json.loads((folder / "exported" / "verification.json").read_text())["verdict"] == "equal"


def adapters_are_exact_and_chats_answered(folder: Path, outputs: Mapping[str, str]) -> None:
    [chats] = [text for command, text in outputs.items() if "--input chats.jsonl" in command]
    counted = re.search(r"^([\d,]+) of [\d,]+ tokens count in the loss; the longest", chats, re.MULTILINE)
    # Digits, a full stop, the ends of the answer and of the document.
    assert counted is not None
    assert int(counted[1]) >= 60 * 4
    [answer] = [text for command, text in outputs.items() if "/v1/chat/completions" in command]
    assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"
    assert (folder / "exported-chat" / "chat_template.jinja").is_file()
    assert "equal: 21 tensors" in outputs["neox-convert verify merged exported"].splitlines()
    assert json.loads((folder / "peft" / "adapter_config.json").read_text())["r"] == 8
    run(folder, "neox-convert from-peft peft --base imported --output again")
    text = run(folder, "neox-launch generate --config again/model.yml --prompt def --set maximum-tokens=4")
    assert "def" in text


# Of the documents that require something; the others begin with nothing.
STAGES = {
    "docs/tutorial.md": Stage(
        requires=("transformers", "starlette"),
        smaller={
            "neox-launch --config run/config.yml\n$ neox-report": (
                "neox-launch --config run/config.yml --set train-iters=6 --set eval-iters=1\n$ neox-report"
            ),
            "--set train-iters=600": "--set train-iters=8 --set eval-iters=1",
            "--set hidden-dropout=0.1": "--set hidden-dropout=0.1 --set train-iters=6 --set eval-iters=1",
            "--set finetune=true": "--set finetune=true --set train-iters=6 --set eval-iters=1",
            "train-iters: 300": "train-iters: 6",
            "eval-iters: 10": "eval-iters: 1",
        },
    ),
    "docs/huggingface.md": Stage(
        requires=("transformers",),
        prepare=write_model_and_texts,
        smaller={"--set eval-iters=10": "--set eval-iters=1"},
        then=the_exported_model_learned,
    ),
    "docs/finetuning.md": Stage(
        requires=("transformers", "peft", "starlette"),
        prepare=write_model_and_pairs,
        smaller={
            "train-iters: 500": "train-iters: 4",
            "train-iters: 400": "train-iters: 4",
            "eval-iters: 10": "eval-iters: 1",
            "maximum-tokens: 64": "",
        },
        then=adapters_are_exact_and_chats_answered,
    ),
}


@pytest.mark.parametrize("document", RUN)
def test_the_commands_of_a_document_run(document, tmp_path):
    stage = STAGES.get(document, Stage())
    for package in stage.requires:
        pytest.importorskip(package)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    stage.prepare(tmp_path)
    text = read(document)
    for given, smaller in stage.smaller.items():
        assert given in text
        text = text.replace(given, smaller)
    outputs: dict[str, str] = {}
    for block in blocks_of(text):
        if block.file_name is not None:
            (tmp_path / block.file_name).write_text(block.text)
        if is_run(block):
            outputs |= run_block(tmp_path, block)
    shown = sum(
        len(re.findall(r"^\$ ", block.text, re.MULTILINE)) for block in blocks_of(text) if is_run(block)
    )
    assert len(outputs) == shown
    stage.then(tmp_path, outputs)
