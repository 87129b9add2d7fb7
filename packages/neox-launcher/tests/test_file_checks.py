"""What is read of the files that a configuration names, before anything starts."""

import json
import struct

import pytest

from neox_launcher.file_checks import check_files


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A dataset of one document of four tokens, and a tokenizer of 20 entries."""
    monkeypatch.chdir(tmp_path)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 1)
    (tmp_path / "data.idx").write_bytes(header + struct.pack("<iqq", 4, 0, 0))
    (tmp_path / "data.bin").write_bytes(bytes(8))
    words = {str(number): number for number in range(20)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return tmp_path


SETTINGS = "data-path: data\nvocab-file: tokenizer.json\ntokenizer-type: HFTokenizer\n"


@pytest.mark.parametrize("manifest", [None, "no JSON", "[]", '{"tokenizer": {"vocab_size": 20}}'])
def test_a_dataset_fits_unless_its_manifest_says_otherwise(load, files, manifest):
    if manifest is not None:
        (files / "data.manifest.json").write_text(manifest)
    assert check_files(load(SETTINGS), program="train") == []


def test_a_dataset_of_another_tokenizer_is_found_before_the_start(load, files):
    (files / "data.manifest.json").write_text('{"tokenizer": {"vocab_size": 50257}}')
    (problem,) = check_files(load(SETTINGS), program="train")
    assert (problem.name, problem.value, problem.place.line) == ("data_path", "data", 1)
    assert problem.what == "was made with a tokenizer of 50,257 entries; the configured one has 20"
    assert problem.remedy.startswith("configure the tokenizer that made it")


@pytest.mark.parametrize("block", ["tensorboard", "csv_monitor"])
def test_the_folder_of_a_monitor_can_be_made(load, files, block):
    text = f"{SETTINGS}{block}: {{enabled: true, output_path: data.bin/x}}"
    (problem,) = check_files(load(text), program="train")
    assert (problem.name, problem.place.line) == (f"{block}.output_path", 4)
    assert problem.what == "cannot be written to: data.bin is a file"
    assert check_files(load(text.replace("true", "false")), program="train") == []


def test_packages_of_monitors_are_looked_for_where_neox_model_is_installed(load, files, monkeypatch):
    config = load(SETTINGS + "tensorboard-dir: events\nuse-wandb: true\n")
    installed = {"neox_model", "tensorboard"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    (problem,) = check_files(config, program="train")
    assert (problem.name, problem.remedy) == ("use_wandb", "pip install wandb")
    installed.clear()
    assert check_files(config, program="train") == []


@pytest.mark.parametrize(
    ("folders", "remedy"),
    [
        ("save: runs\nsave-interval: 1\nload: runs/", None),
        ("load: old", None),
        ("load: misspelt", "name the folder that a training saved to; to begin with new weights, "),
        ("save: runs\nsave-interval: 1\nload: run", "name the folder that a training saved to; "),
        ("load: old/global_step5", "write load: old, the folder of all checkpoints; "),
    ],
)
def test_only_a_training_that_saves_there_may_begin_without_a_checkpoint(load, files, folders, remedy):
    (files / "old/global_step5").mkdir(parents=True)
    (files / "old/global_step5/manifest.json").write_text("{}")
    problems = check_files(load(f"{SETTINGS}{folders}\n"), program="train")
    if remedy is None:
        assert problems == []
        return
    (problem,) = problems
    assert (problem.name, problem.what) == ("load", "holds no checkpoint")
    assert problem.remedy.startswith(remedy)
