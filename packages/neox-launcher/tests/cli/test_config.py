"""The commands `neox-config check`, `show`, `explain`, `docs` and `schema`."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from neox_config import load_config
from neox_config.describe.reference import reference
from neox_launcher.cli.config import main
from support.refusals import shows


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_valid_file_is_reported_as_valid(minimal):
    result = run("check", minimal)
    assert (result.exit_code, result.stderr) == (0, "")
    assert shows(result.stdout, minimal, "9 parameters", "neox-config", "--files", "(neox-launch --dry-run)")


@pytest.mark.parametrize("name", ["", "/"])
def test_a_path_without_a_name_is_reported(name):
    result = run("check", name)
    assert (result.exit_code, "is a directory" in result.output) == (2, True)


@pytest.mark.parametrize("encoding", ["0", "1"])
def test_a_name_that_the_environment_cannot_encode_is_reported(minimal, tmp_path, encoding):
    (tmp_path / "more.yml").write_text('data-path: "l\u00e4uf/corpus"\n', encoding="utf-8")
    environment = {"LC_ALL": "C", "PYTHONUTF8": encoding, "PYTHONCOERCECLOCALE": "0"}
    program = "from neox_launcher.cli.config import main; main()"
    command = [sys.executable, "-c", program, "check", str(minimal), str(tmp_path / "more.yml"), "--files"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=False)
    shown = done.stderr.decode()
    assert done.returncode == 2
    assert ("PYTHONUTF8=1" in shown) == (encoding == "0")
    assert ("läuf/corpus.idx does not" in shown) == (encoding == "1")
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "encoding"),
    [
        (["generate", "minimal.yml", "--prompt"], "0"),
        (["find-blocks", "minimal.yml", "--query"], "0"),
        (["generate", "minimal.yml", "--prompt"], "1"),
    ],
)
def test_a_text_that_the_environment_cannot_decode_is_refused(minimal, words, encoding):
    environment = {"LC_ALL": "C", "PYTHONUTF8": encoding, "PYTHONCOERCECLOCALE": "0"}
    value = b"prompt=l\xe4uf"
    command = [sys.executable, "-c", "from neox_launcher.cli.launch import main; main()", *words, value]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=minimal.parent, capture_output=True, check=False
    )
    shown = done.stderr.decode()
    assert (done.returncode, "codec can't encode" in shown, "Traceback" in shown) == (2, True, False), shown


def test_notes_are_printed_and_do_not_fail(minimal):
    result = run("check", minimal, "--set", "rank=3")
    assert result.exit_code == 0
    assert "1 note" in result.stderr


def test_a_width_that_is_slow_in_16_bits_is_noted(minimal):
    settings = ["--set", "hidden-size=2048", "--set", "activation=swiglu"]
    note = (
        "command line: 1 note\n\n  --set hidden-size: 2048\n    gives an MLP width of 5,461 with activation: "
        "swiglu; products in 16 bits are slow unless widths are multiples of 8\n    set mlp-width: 5504\n\n"
    )
    assert run("check", minimal, *settings, "--set", "precision=bfloat16").stderr == note
    assert run("check", minimal, *settings).stderr == ""
    refused = run(
        "check", minimal, *settings, "--set", "precision=bfloat16", "--set", "num-attention-heads=3"
    )
    assert "16 bits" not in refused.stderr


def test_the_width_of_the_vocabulary_is_checked_with_the_files(minimal, folder):
    settings = ("precision=bfloat16", "tokenizer-type=CharLevelTokenizer", "make-vocab-size-divisible-by=3")
    options = [f"--set={setting}" for setting in (*settings, "data-path=data", "eval-iters=0")]
    assert run("check", minimal, *options).stderr == ""
    assert shows(run("check", minimal, *options, "--files").stderr, "513 entries", "16 bits", "8")


def test_a_file_that_is_no_vocabulary_is_a_problem_of_its_parameter(minimal, folder, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    options = [f"--set={setting}" for setting in ("data-path=data", "eval-iters=0", f"vocab-file={file}")]
    result = run("check", minimal, *options, "--set=tokenizer-type=HFTokenizer", "--files")
    assert result.exit_code == 2
    assert shows(result.stderr, f"--set vocab-file: {file}", "(KeyError: 'model')")


def test_everything_that_a_launch_would_refuse_is_reported_in_one_round(minimal, tmp_path):
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=2\n")
    more = tmp_path / "more.yml"
    more.write_text(
        f"hostfile: {tmp_path}/hosts\nlauncher: local\nmodel-parallel-size: 3\n"
        "compression_training: {layer_reduction: {enabled: true, teacher: gone, keep_number_layer: 4, "
        "module_name_prefix: layers, teacher_layer: [0, 1, 2, 3]}}\n"
        "data-path: gone\nload: gone\nsample-input-file: gone.txt\n"
    )
    result = run("check", minimal, more, "--files")
    assert result.exit_code == 2
    for line, sentence in {
        2: "launcher: local\n          starts workers on this machine only, but the job has another",
        3: "model-parallel-size: 3\n          does not divide the 4 devices of this job (2 hosts)",
        4: "compression_training.layer_reduction.teacher: gone\n          contains no checkpoint",
        5: "data-path: gone\n          gone.idx does not exist",
        6: "load: gone\n          contains no checkpoint",
        7: "sample-input-file: gone.txt\n          does not exist",
    }.items():
        assert f"  line {line}  {sentence}" in result.stderr


def test_prompts_are_checked_only_if_the_mode_reads_them(minimal):
    settings = ("--set", "sample-input-file=gone.txt", "--set", "num-samples=10")
    reads = run("check", minimal, "--files", *settings).stderr
    does_not = run("check", minimal, "--files", *settings, "--set", "text-gen-type=unconditional").stderr
    assert "gone.txt\n" in reads
    assert "gone.txt" not in does_not


def test_with_files_nothing_is_said_about_files_that_were_not_checked(minimal, monkeypatch):
    monkeypatch.setattr("neox_launcher.cli.config.check_files", lambda config, program: [])
    result = run("check", minimal, "--files")
    assert shows(result.stdout, minimal, "9 parameters")


def test_paths_that_the_system_refuses_are_reported(minimal, tmp_path):
    """A name that is too long stands for folders that this user cannot enter: root could enter them."""
    long = "n" * 300
    more = tmp_path / "more.yml"
    more.write_text(
        f"data-path: {long}\nvocab-file: {long}\nhostfile: {long}\nload: {long}\nsample-input-file: {long}\n"
    )
    for command in ("check", "show", "estimate"):
        assert run(command, minimal, more).exit_code == 0
    result = run("check", minimal, more, "--files")
    assert result.exit_code == 2
    for line in range(1, 6):
        assert re.search(
            rf"line {line}  .*n[.]*\n.*cannot be read \(File name too long\)\n", result.stderr
        ), line
    assert shows(run("check", tmp_path / long).stderr, f"{tmp_path / long}: 1", "YAML")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "hostfile: {}\n    does not exist\n    correct the path, or use this machine"),
        ("one slots=x", "line 1  one slots=x"),
    ],
)
def test_the_hostfile_is_checked_with_the_files(minimal, tmp_path, content, sentence):
    path = tmp_path / "hosts"
    if content is not None:
        path.write_text(content)
    result = run("check", minimal, "--set", f"hostfile={path}", "--files")
    assert result.exit_code == 2
    assert sentence.format(path) in result.stderr
    assert "data-path: PREFIX" in result.stderr


def test_a_hostfile_that_is_not_on_this_machine_is_noted(minimal):
    """As those of GPT-NeoX's configurations, which name /mock_path."""
    result = run("check", minimal, "--set", "hostfile=/mock_path")
    assert result.exit_code == 0
    assert shows(result.stderr, "/mock_path", "neox-launch")


def test_a_schedule_that_the_training_does_not_finish_is_noted(minimal):
    with minimal.open("a") as file:
        file.write("\nlr-decay-iters: 320000\nwarmup: 0.01\nlr-decay-style: cosine\n")
    result = run("check", minimal, "--set", "train-iters=20")
    assert result.exit_code == 0
    note = (
        "    ends the run before its learning rate has reached min-lr: the schedule has 320,000 "
        "iterations (lr-decay-iters)"
    )
    assert f"train-iters: 20\n{note}" in result.stderr
    assert "lr-decay-iters: 20, too" in result.stderr
    # Wherever the values are from.
    both = ("--set", "train-iters=20", "--set", "lr-decay-iters=320000")
    assert note in run("check", minimal, *both).stderr
    assert note in run("check", minimal).stderr
    for reached in ("lr-decay-iters=20", "lr-decay-style=constant"):
        assert note not in run("check", minimal, "--set", "train-iters=20", "--set", reached).stderr


def test_positions_that_rotary_embeddings_do_not_use_are_not_noted(minimal):
    positions = ("--set", "pos-emb=rotary", "--set", "max-position-embeddings=512", "--set", "seq-length=32")
    assert run("check", minimal, *positions).stderr == ""


def test_an_evaluation_without_a_document_is_noted(minimal, folder):
    result = run("check", minimal, "--set", "data-path=data")
    assert result.exit_code == 0
    assert shows(result.stderr, "2 notes", "969, 30, 1", "1")
    assert run("check", minimal, "--set", "data-path=data", "--set", "split=1,0,0").stderr == ""
    assert (
        "data has 1" not in run("check", minimal, "--set", "data-path=data", "--set", "eval-iters=0").stderr
    )


@pytest.mark.parametrize(
    ("split", "problem"),
    [("1,9,0", "leaves no document for training: data has 1"), ("0,1,0", "has no share for training")],
)
def test_a_training_without_a_document_is_refused(minimal, folder, split, problem):
    result = run("check", minimal, "--set", "data-path=data", "--set", f"split={split}", "--files")
    assert result.exit_code == 2
    assert problem in result.stderr


@pytest.mark.parametrize(
    ("settings", "skipped"),
    [
        ("split='969'", "validation and the test, which are"),
        ("split='969' eval-iters=10", "validation and the test, which are"),
        ("split=1,0,0 eval-iters=10", "validation and the test, which are"),
        ("split=1,0,0 eval-interval=10", "validation and the test, which are"),
        ("split=9,0,1 eval-iters=10", "validation, which is"),
        ("split=1,0,0", ""),
        ("split=9,0,1", ""),
        ("split='969' eval-iters=0", ""),
        ("split=9,1 eval-iters=10", ""),
    ],
)
def test_a_split_without_validation_is_noted_once_unless_it_is_meant(minimal, settings, skipped):
    options = [word for setting in settings.split() for word in ("--set", setting)]
    result = run("check", minimal, "--set", "data-path=nowhere", *options)
    noted = [line.strip() for line in result.stderr.splitlines() if "share" in line]
    assert noted == ([f"has no share for {skipped} therefore skipped"] if skipped else [])
    assert result.exit_code == 0


def test_an_invalid_file_fails_with_2(minimal):
    result = run("check", minimal, "--set", "seed=x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "whole number" in result.stderr


def test_a_file_is_checked_for_its_cluster(minimal):
    assert run("check", minimal, "--set", "model-parallel-size=4", "--devices", 8).exit_code == 0
    result = run("check", minimal, "--set", "model-parallel-size=4", "--devices", 6)
    assert "the 6 devices" in result.stderr


WITHOUT_DATA = ("--set", "train-iters=null", "--set", "train-epochs=3", "--set", "data-path=absent")


@pytest.mark.parametrize("command", ["check", "show", "estimate"])
def test_passes_over_absent_data_are_described_as_far_as_they_are_known(minimal, command):
    result = run(command, minimal, *WITHOUT_DATA)
    assert result.exit_code == 0, result.output
    note = " ".join(result.stderr.split())
    assert shows(note, "train-epochs: 3", "absent.idx")
    assert "train-iters and what" in note
    if command == "show":
        assert "train_batch_size: " in result.stdout
        assert "lr_decay_iters: " not in result.stdout.partition("# On ")[2]
        given = run(command, minimal, *WITHOUT_DATA, "--set", "lr-decay-iters=7").stdout
        assert "# lr_decay_iters: 7" in given.partition("# On ")[2]
    if command == "estimate":
        timed = run(command, minimal, *WITHOUT_DATA, "--tflops", 100)
        assert (timed.exit_code, timed.stdout) == (0, result.stdout)


@pytest.mark.parametrize("arguments", [("schedule",), ("check", "--files")])
def test_what_requires_the_data_refuses_passes_over_absent_data(minimal, arguments):
    command, *more = arguments
    result = run(command, minimal, *WITHOUT_DATA, *more)
    assert result.exit_code == 2
    assert "absent.idx" in result.stderr


def test_all_three_batch_sizes_imply_the_devices(minimal):
    result = run("show", minimal, "--set", "train-batch-size=12", "--set", "gas=2")
    assert "# data_parallel_size: 3" in result.stdout


def test_the_output_of_show_can_be_loaded(minimal, tmp_path):
    overrides = [
        "zero_optimization={stage: 1}",
        "attention-config=[[[global], 4]]",
        "scheduler={type: WarmupLR, params: {warmup_num_steps: 5}}",
    ]
    result = run("show", minimal, *[option for text in overrides for option in ("--set", text)])
    shown = tmp_path / "shown.yml"
    shown.write_text(result.stdout)
    assert load_config([shown]) == load_config([minimal], overrides=overrides)
    rows = {line.partition(":")[0]: line for line in result.stdout.splitlines()}
    assert rows["hidden_size"].endswith(f"# {minimal} line 2")
    assert rows["  stage"].endswith("# command line")
    assert rows["norm"].endswith("# default")


def test_the_engine_configuration_is_json(minimal):
    result = run("show", minimal, "--engine", "--devices", 4)
    assert json.loads(result.stdout)["train_batch_size"] == 8


def test_only_changed_values_are_shown(minimal):
    result = run("show", minimal, "--changed", "--set", "seed=7", "--set", "norm=layernorm")
    rows = {line.partition("  #")[0].rstrip(): line.partition("# ")[2] for line in result.stdout.splitlines()}
    assert rows == {
        "num_layers: 4": f"{minimal} line 1",
        "hidden_size: 64": f"{minimal} line 2",
        "num_attention_heads: 4": f"{minimal} line 3",
        "max_position_embeddings: 32": f"{minimal} line 5",
        "train_iters: 10": f"{minimal} line 6",
        "train_micro_batch_size_per_gpu: 2": f"{minimal} line 7",
        "optimizer:": "",
        "  params:": "",
        "    lr: 0.001": f"{minimal} line 8",
        "seed: 7": "command line",
    }


@pytest.mark.parametrize(
    "overrides",
    [
        ["seq-length=16", "finetune=true", "weight-decay=0.1", "comet.others={a: b}"],
        [
            "optimizer.params.weight_decay=0.2",
            "scheduler={type: WarmupLR, params: {warmup_num_steps: 5}}",
            "precision=bf16",
        ],
        [
            "compression_training.sparse_pruning.different_groups="
            "{one: {modules: [a], params: {dense_ratio: 0.5}}}",
            "attention-config=[[[global], 4]]",
        ],
    ],
)
def test_the_changed_values_make_the_same_configuration(minimal, tmp_path, overrides):
    if "seq-length=16" in overrides:
        minimal.write_text(minimal.read_text().replace("seq-length: 32\n", ""))
    shown = tmp_path / "shown.yml"
    options = [option for text in overrides for option in ("--set", text)]
    shown.write_text(run("show", minimal, "--changed", *options).stdout)
    assert load_config([shown]) == load_config([minimal], overrides=overrides)
    assert len(shown.read_text().splitlines()) < 25


def test_what_follows_from_a_changed_value_is_not_repeated(minimal):
    shown = run("show", minimal, "--changed", "--set", "weight-decay=0.1", "--set", "finetune=true").stdout
    assert shown.count("weight_decay") == 1
    assert re.search(r"no_load_optim: true +# follows from finetune: true", shown)


def test_the_interval_of_log_lines_follows_from_that_of_deepspeed(minimal):
    shown = run("show", minimal, "--set", "steps_per_print=7").stdout
    assert re.search(r"log_interval: 7 +# follows from steps_per_print: 7", shown)
    assert re.search(r"log_interval: 100 +# default", run("show", minimal).stdout)


def test_changed_and_engine_exclude_each_other(minimal):
    result = run("show", minimal, "--changed", "--engine")
    assert result.exit_code == 2
    assert shows(result.stderr, "--engine", "--changed")


def test_empty_groups_are_shown_as_defaults(minimal):
    assert re.search(r"curriculum_metrics: \{\} +# default", run("show", minimal).stdout)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rotary-pct", "used when    pos_emb is rotary"),
        ("rotary-pct", "read by      neox_config.spec.mixers"),
        ("gas", "gas is called gradient_accumulation_steps here"),
        ("geglu", "geglu is an older spelling"),
        ("zero_optimization", "Partitioning of model states across data-parallel ranks"),
        ("stage", "zero_optimization.stage"),
        ("world-size", "world_size is computed: the number of devices of the job"),
        ("attention_type", "attention_type has no effect"),
        ("checkpoint-factor", "checkpoint_factor is an older spelling: save_interval"),
        ("n-layer", "n_layer is called num_layers here"),
    ],
)
def test_a_name_is_explained(name, sentence):
    result = run("explain", name)
    assert result.exit_code == 0
    assert sentence in result.stdout


def test_an_unknown_name_gets_a_suggestion():
    result = run("explain", "rotary-pc")
    assert result.exit_code == 2
    assert shows(result.stderr, "rotary-pc", "rotary_pct?")


def test_several_words_are_one_question():
    result = run("explain", "gradient", "accumulation")
    assert result.exit_code == 0
    assert "\n  gradient_accumulation_steps " in result.stdout
    assert run("explain").exit_code == 2


def test_the_reference_and_the_schema_are_printed():
    assert run("docs").stdout == reference()
    assert json.loads(run("schema").stdout)["title"] == "NeoX configuration"
