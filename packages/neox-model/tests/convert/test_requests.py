"""What the command line names is checked before torch is imported, and refused with exit code 2."""

import json
from typing import get_args

import pytest
from click.testing import CliRunner

from neox_config.facts.hugging_face import HfFamily
from neox_model.convert import cli
from neox_model.convert.families import FAMILIES
from support.refusals import shows

NO_FOLDER = "nothing is downloaded, so pass the folder of a model"
FULL = "already exists; pass another --output, or remove it first"
NO_CHECKPOINT = "pass the folder given by `save`, or one checkpoint in it"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with models and checkpoints as far as requests are checked; conversions do not begin."""

    def refused(name):
        raise AssertionError(f"{name} would import torch")

    monkeypatch.setattr(cli, "_with_torch", refused)
    monkeypatch.chdir(tmp_path)
    model = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    write(tmp_path, "model", {"config.json": model, "tokenizer.json": {}})
    write(tmp_path, "bert", {"config.json": {"model_type": "bert", "architectures": ["BertModel"]}})
    write(tmp_path, "code", {"config.json": {"model_type": "mine", "auto_map": {}}})
    write(tmp_path, "untokenized", {"config.json": model})
    write(tmp_path, "adapters", {"adapter_config.json": {"base_model_name_or_path": "org/base"}})
    write(tmp_path, "ours/global_step1", {"manifest.json": {}})
    (tmp_path / "ours" / "latest").write_text("global_step1\n")
    write(tmp_path, "full", {"file": {}})
    return tmp_path


def write(folder, name, files):
    (folder / name).mkdir(parents=True)
    for file, contents in files.items():
        (folder / name / file).write_text(json.dumps(contents))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "from-hf nowhere --output new",
            f"nowhere has no config.json, so it is not a model of transformers; {NO_FOLDER}",
        ),
        ("from-hf bert --output new", "config.json has model_type 'bert' with architectures ['BertModel']"),
        ("from-hf code --output new", "config.json names code in the model's folder (auto_map)"),
        ("to-hf --output new", "give the folder of the checkpoint once: --load DIR, or DIR"),
        ("from-hf untokenized --output new", "untokenized contains no tokenizer (tokenizer.json"),
        ("from-hf model --output full", FULL),
        ("to-hf --load ours --output full", FULL),
        ("to-hf --load nowhere --output new", f"nowhere is not a folder; {NO_CHECKPOINT}"),
        ("to-peft --load ours --model model --output full", FULL),
        ("to-peft --load nowhere --model model --output new", NO_CHECKPOINT),
        ("to-peft --load ours --model nowhere --output new", NO_FOLDER),
        ("from-peft adapters --base ours --model model --output full", FULL),
        ("from-peft adapters --base nowhere --output new", NO_CHECKPOINT),
        ("from-peft nowhere --base ours --output new", "cannot read nowhere/adapter_config.json"),
        ("from-peft adapters --base ours --output new", "names the base 'org/base', which is not the folder"),
        ("from-peft adapters --base ours --model bert --output new", "model_type 'bert'"),
        ("from-neox nowhere --output new", "nowhere is not a folder; pass the folder of a checkpoint of GPT"),
        ("from-neox full --output new", "contains neither files of a checkpoint of GPT-NeoX"),
        ("compress --load ours --output full", FULL),
        ("compress --load nowhere --output new", NO_CHECKPOINT),
        ("verify ours nowhere", NO_CHECKPOINT),
        ("verify bert ours", "model_type 'bert'"),
        (f"from-hf model --output {'x' * 300}", "File name too long"),
    ],
)
def test_a_wrong_request_is_refused_without_torch(folder, line, message):
    found = CliRunner().invoke(cli.main, line.split())
    assert isinstance(found.exception, SystemExit), found.exception
    assert (found.exit_code, message in found.stderr) == (2, True), found.stderr
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    "line",
    [
        "from-hf model --output new",
        "to-hf --load ours --output new",
        "to-hf ours --output new",
        "from-peft adapters --base ours --model model --output new",
        "verify model ours",
    ],
)
def test_a_request_that_may_be_right_begins(folder, line):
    assert "would import torch" in str(CliRunner().invoke(cli.main, line.split()).exception)


@pytest.mark.parametrize(
    ("given", "name"),
    [("bf16", "bf16"), ("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), (None, None)],
)
def test_a_data_type_may_be_given_by_its_name_in_torch(folder, monkeypatch, given, name):
    calls = []

    def to_hf(checkpoint, output, **options):
        calls.append(options["dtype"])
        return {"class": "C", "parameters": 1, "tensors": 1, "largest_differences": {}, "limit": 1.0}

    monkeypatch.setattr(cli, "_with_torch", lambda name: to_hf)
    words = ["to-hf", "--load", "ours", "--output", "new", *([] if given is None else ["--dtype", given])]
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    assert calls == [name]


def test_every_class_is_declared_once():
    assert list(FAMILIES) == list(get_args(HfFamily))


def test_a_checkpoint_of_this_project_is_not_converted_from_gpt_neox(tmp_path):
    folder = tmp_path / "checkpoints/global_step3"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    for given in (folder, folder.parent):
        result = CliRunner().invoke(cli.main, ["from-neox", str(given), "--output", str(tmp_path / "out")])
        assert result.exit_code == 2
        assert shows(result.stderr, "GPT-NeoX")
        assert shows(result.stderr, "neox-convert", "to-hf", "--load", given, "--output", "DIR")


TO_HF = "it can be loaded as it is, and neox-convert to-hf --load ours --output DIR exports it"
FROM_HF = (
    "contains a model of transformers, not a checkpoint of this project; convert it with neox-convert from-hf"
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from-hf ours", f"ours contains a checkpoint of this project, not a model of transformers; {TO_HF}"),
        ("from-hf neox", "not a model of transformers; convert it with neox-convert from-neox neox"),
        ("from-hf adapters", "convert them with neox-convert from-peft adapters --base DIR"),
        ("from-hf model/config.json", "model/config.json is a file; pass its folder, model\n"),
        ("to-hf model", f"model {FROM_HF} model --output DIR"),
        ("to-hf ours/latest", "ours/latest is a file; pass its folder, ours\n"),
        ("compress model", f"model {FROM_HF} model --output DIR"),
        ("from-neox model", "not a checkpoint of GPT-NeoX; convert it with neox-convert from-hf model"),
        ("from-peft ours --base ours", "not adapters of PEFT; it can be loaded as it is"),
        ("from-peft adapters --base model", f"model {FROM_HF} model --output DIR"),
        ("to-peft ours --model ours", f"not a model of transformers; {TO_HF}"),
    ],
)
def test_a_folder_of_another_kind_is_answered_with_its_command(folder, line, message):
    write(folder, "neox/global_step1", {"mp_rank_00_model_states.pt": {}})
    found = CliRunner().invoke(cli.main, [*line.split(), "--output", "new"])
    assert (found.exit_code, message in found.stderr) == (2, True), found.stderr


def test_a_file_of_a_side_is_answered_with_its_folder(folder):
    found = CliRunner().invoke(cli.main, ["verify", "model/config.json", "ours"])
    assert (found.exit_code, found.stderr) == (
        2,
        "Error: model/config.json is a file; pass its folder, model\n",
    )
