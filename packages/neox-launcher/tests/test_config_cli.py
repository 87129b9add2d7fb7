"""`neox-config`: check, show, explain, docs, schema."""

import json

import pytest
from click.testing import CliRunner

from neox_launcher.config import load_config
from neox_launcher.config.reference import reference
from neox_launcher.config_cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_valid_file_is_said_to_be_valid(minimal):
    result = run("check", minimal)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{minimal}: valid, 9 parameters given\n"


def test_notes_are_told_and_do_not_fail(minimal):
    result = run("check", minimal, "--set", "rank=3", "--set", "char-level-ppl=true")
    assert result.exit_code == 0
    assert "command line: 2 notes" in result.stderr
    assert "--set char-level-ppl: true\n    is not built yet" in result.stderr


def test_a_wrong_file_fails_with_2(minimal):
    result = run("check", minimal, "--set", "seed=x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "must be a whole number" in result.stderr


def test_a_file_is_judged_for_its_cluster(minimal):
    assert run("check", minimal, "--set", "model-parallel-size=4", "--devices", 8).exit_code == 0
    result = run("check", minimal, "--set", "model-parallel-size=4", "--devices", 6)
    assert "does not divide the 6 devices" in result.stderr


def test_all_three_batch_sizes_imply_the_devices(minimal):
    result = run("show", minimal, "--set", "train-batch-size=12", "--set", "gas=2")
    assert "# data_parallel_size: 3" in result.stdout


def test_what_is_shown_can_be_loaded_again(minimal, tmp_path):
    overrides = [
        "zero_optimization={stage: 1}",
        "attention-config=[[[global], 4]]",
        "scheduler.params={a: 1}",
    ]
    result = run("show", minimal, *[option for text in overrides for option in ("--set", text)])
    shown = tmp_path / "shown.yml"
    shown.write_text(result.stdout)
    assert load_config([shown]) == load_config([minimal], overrides=overrides)
    rows = {line.partition(":")[0].strip(): line for line in result.stdout.splitlines()}
    assert rows["hidden_size"].endswith(f"# {minimal} line 2")
    assert rows["stage"].endswith("# command line")
    assert rows["norm"].endswith("# default")


def test_the_engine_s_part_is_json(minimal):
    result = run("show", minimal, "--engine", "--devices", 4)
    assert json.loads(result.stdout)["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rotary-pct", "used when    pos_emb is rotary"),
        ("rotary-pct", "carried out  by neox_model.build.attention"),
        ("gas", "gas stands for gradient_accumulation_steps"),
        ("geglu", "geglu is an older spelling"),
        ("zero_optimization", "What data-parallel ranks share"),
        ("stage", "zero_optimization.stage"),
        ("world-size", "world_size is computed: the number of devices of the job"),
        ("mask_prob", "mask_prob has no effect"),
        ("checkpoint-factor", "checkpoint_factor is called save_interval here"),
    ],
)
def test_a_name_is_explained(name, sentence):
    result = run("explain", name)
    assert result.exit_code == 0
    assert sentence in result.stdout


def test_an_unknown_name_gets_a_question():
    result = run("explain", "rotary-pc")
    assert result.exit_code == 2
    assert result.stderr == "rotary_pc is not a parameter; did you mean rotary_pct?\n"


def test_the_reference_and_the_schema_are_printed():
    assert run("docs").stdout == reference()
    assert json.loads(run("schema").stdout)["title"] == "NeoX configuration"
