"""Configuration files and parameters on command lines, and the answers to other words."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from neox_launcher.cli import launch as cli
from neox_launcher.cli.config import main as neox_config
from neox_launcher.cli.launch import main
from neox_launcher.plan.planning import plan_launch
from support.refusals import shows

PROGRAMS = {"neox-launch": main, "neox-config": neox_config}


@pytest.fixture
def requests(monkeypatch, tmp_path):
    """Record the requests instead of launching them, in a folder with configuration files."""
    found = []
    monkeypatch.setattr(
        cli, "_launch", lambda request, dry_run, wanted=None: found.append((request, dry_run))
    )
    monkeypatch.chdir(tmp_path)
    for name in (
        "small.yml",
        "a.yml",
        "configs/big.yml",
        "configs/c.yml",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    return found


def run(*arguments):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "paths", "directory"),
    [
        ("a.yml b.yml", ("a.yml", "b.yml"), None),
        ("--config a.yml b.yaml c.json", ("a.yml", "b.yaml", "c.json"), None),
        ("small a", ("small", "a"), None),
        ("-d configs big", ("big",), "configs"),
        ("big -d configs", ("big",), "configs"),
        ("-dconfigs big", ("big",), "configs"),
        ("--directory=configs big other.yml", ("big", "other.yml"), "configs"),
        ("configs/train.yml", ("configs/train.yml",), None),
        ("a.yml --set x=y b.yml --output all c.yml", ("a.yml", "b.yml", "c.yml"), None),
        ("--set x=y a.yml -- -b.yml", ("a.yml", "-b.yml"), None),
    ],
)
@pytest.mark.parametrize("command", ["", "generate", "doctor"])
def test_files_are_configuration_files(requests, words, paths, directory, command):
    result = run(*f"{command} {words}".split())
    assert result.exit_code == 0, result.output
    request, _ = requests.pop()
    assert (request.program, sorted(request.paths), request.directory) == (
        command or "train",
        sorted(paths),
        directory,
    )


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("-i p.txt", {"sample_input_file": "p.txt", "text_gen_type": "input-file"}),
        (
            "-i p.txt -o out.jsonl --set text-gen-type=interactive",
            {"text-gen-type": "interactive", "sample_input_file": "p.txt", "sample_output_file": "out.jsonl"},
        ),
        ("--sample_output_file=out.jsonl", {"sample_output_file": "out.jsonl"}),
    ],
)
def test_generate_takes_the_files_as_gpt_neox_does(requests, words, overrides):
    result = run("generate", "a.yml", *words.split())
    assert result.exit_code == 0, result.output
    ((request, _),) = requests
    found = dict(each.split("=", 1) for each in request.overrides)
    assert {name: yaml.safe_load(value) for name, value in found.items()} == overrides


def test_a_prompt_and_a_file_of_prompts_exclude_each_other(requests):
    result = run("generate", "a.yml", "-i", "p.txt", "--prompt", "Once")
    assert (result.exit_code, "--prompt and -i exclude each other" in result.output) == (2, True)


def test_a_configuration_may_have_the_name_of_a_script_of_gpt_neox(requests):
    assert run("cf/train").exit_code == 0
    assert requests.pop()[0].paths == ("cf/train",)


def test_a_dry_run_before_a_file_keeps_the_file(requests):
    assert run("--dry-run", "a.yml").exit_code == 0
    (request, dry_run) = requests.pop()
    assert (request.paths, dry_run) == (("a.yml",), "text")


def test_a_command_after_two_dashes_has_options(requests):
    result = run("--", "generate", "--prompt", "Once", "--", "a.yml")
    assert result.exit_code == 0, result.output
    (request, _) = requests.pop()
    assert (request.program, request.paths) == ("generate", ("a.yml",))
    assert request.overrides == ("prompt=Once",)


@pytest.mark.parametrize("spelling", ["{0}_{1}", "{0}-{1}"])
def test_parameters_of_the_launcher_are_options(requests, spelling):
    words = []
    for name, value in (("num nodes", "2"), ("num gpus", "4"), ("master addr", "::1"), ("master port", "5")):
        words += [f"--{spelling.format(*name.split())}", value]
    words += ["--hostfile", "my 'hosts'", "--include", "[fd00::7]:0,1", "--exclude=n1", "--launcher", "ssh"]
    words += ["--hf-export-at-end", "out"]
    assert run("--set", "seed=1", "doctor", "a.yml", *words).exit_code == 0
    (request, _) = requests.pop()
    assert set(request.overrides) == {
        *("seed=1", "hostfile=my 'hosts'", 'include="[fd00::7]:0,1"', "exclude=n1"),
        *("num_nodes=2", "num_gpus=4", "master_addr=::1", "master_port=5", "launcher=ssh"),
        "hf_export=out",
    }


def test_an_option_has_the_effect_of_the_parameter(requests, minimal, tmp_path):
    hosts = tmp_path / "it's hosts"
    hosts.write_text("n1 slots=4\nfd00::7 slots=4\n")
    options = ["--hostfile", str(hosts), "--include", "[fd00::7]:0,1", "--launcher", "ssh"]
    assert run(str(minimal), "--set", "include=n1", *options, "--master_port", "7000").exit_code == 0
    ((request, _),) = requests
    planned = plan_launch(request, gpus=0, environment={})
    assert [(host.name, host.slots) for host in planned.world.hosts] == [("fd00::7", (0, 1))]
    assert (planned.launcher, planned.master_port) == ("ssh", 7000)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train.py -d configs big", "train.py is not a configuration file; use neox-launch FILE"),
        ("neox/evaluate.py a.yml", "use neox-launch evaluate FILE"),
        ("check a.yml", "check is not a configuration file; it is a command of neox-config"),
        ("genrate a.yml", "genrate is not a configuration file; did you mean generate?"),
        ("a.yml generate", "it is a command; write it before the files: neox-launch generate"),
        ("init texts", "Got unexpected extra argument (texts)"),
        ("--hostfil hosts a.yml", "Did you mean '--hostfile'?"),
        ("a.yml --mode x", "No such option '--mode'."),
        ("a.yml --num_nodes two", "is not a valid integer"),
        ("a.yml -H hosts", "use --hostfile FILE"),
        ("generate --top_p a.yml", "--set top-p=VALUE"),
        ("evaluate a.yml --eval_iters 5 --tasks x", "--set eval-iters=VALUE"),
    ],
)
def test_other_words_are_answered_with_what_to_type(requests, words, answer):
    result = run(*words.split())
    assert result.exit_code == 2
    assert answer in " ".join(result.stderr.split())
    assert requests == []


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--iteration 100", "name the folder of that checkpoint: --set load=CHECKPOINTS/global_step1000"),
        (
            "--train_iters 10",
            "No such option: --train_iters; parameters are set with --set: --set train-iters=",
        ),
        ("--learning_rate 10", "--set optimizer.params.lr=VALUE"),
        ("--lr=1", "--set optimizer.params.lr=VALUE"),
        ("--autotuning run", "--set autotuning.NAME=VALUE"),
        ("--push_to_hub", "--push_to_hub; remove it: nothing is uploaded"),
        ("--conf_dir configs", "use -d DIR"),
        ("--conf_file a.yml", "give the name of the file alone"),
    ],
)
@pytest.mark.parametrize(
    "command", ["neox-launch", "neox-launch generate", "neox-config check", "neox-config estimate"]
)
def test_unknown_options_have_the_same_advice_in_both_programs(requests, command, words, answer):
    program, *subcommand = command.split()
    result = CliRunner().invoke(PROGRAMS[program], [*subcommand, "small.yml", *words.split()])
    assert result.exit_code == 2
    assert answer in " ".join(result.stderr.split())
    assert requests == []


def test_a_setting_without_its_option_is_answered_with_it(requests, minimal):
    result = run("a.yml", "train_iters=10")
    assert (result.exit_code, "set parameters with --set: --set train_iters=10" in result.stderr) == (2, True)
    result = CliRunner().invoke(neox_config, ["check", str(minimal), "train_iters=10"])
    assert (result.exit_code, "train_iters=10: 1 problem" in result.stderr) == (2, True)


def test_a_command_without_a_configuration_is_refused(requests, monkeypatch):
    monkeypatch.undo()  # The request reaches the launcher.
    for words in ([], ["generate"], ["-d", "configs"]):
        result = run(*words)
        assert (result.exit_code, "no configuration file given" in result.stderr) == (2, True)


def test_one_folder_may_be_given_twice(requests):
    assert run("-d", "configs", "generate", "--directory", "configs", "big").exit_code == 0
    assert requests[0][0].directory == "configs"


def test_a_value_that_begins_with_d_is_no_folder(requests):
    words = ("generate", "-d", "configs", "big", "--prompt", "-dark")
    assert run(*words).exit_code == 0
    request = requests[0][0]
    assert (request.directory, request.paths) == ("configs", ("big",))
    assert request.overrides == ("prompt=-dark",)


def test_the_option_for_files_is_not_needed_in_neox_config(requests):
    result = CliRunner().invoke(neox_config, ["check", "--config", "a.yml"])
    assert result.exit_code == 2
    assert shows(result.stderr, "--config")


@pytest.mark.parametrize("command", ["diff small.yml a.yml", "explain lr", "models"])
def test_a_command_without_settings_does_not_recommend_them(command, requests):
    result = CliRunner().invoke(neox_config, [*command.split(), "--train_iters", "10"])
    assert result.exit_code == 2
    assert "--set" not in result.stderr


def test_the_plan_of_a_file_is_that_of_config(minimal):
    one = run(str(minimal), "--dry-run=json")
    other = run("--config", str(minimal), "--dry-run=json")
    assert json.loads(one.stdout) == json.loads(other.stdout)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Once",
        'it\'s: "a" #b',
        "two\nlines\\n\t",
        "no",
        "1.0",
        "é 中 😀",
        "\x85\u2028\x7f\ufeff",
        "-x {y}",
    ],
)
def test_the_prompt_of_generate_is_taken_literally(requests, text):
    run("generate", "a.yml", "--set", "seed=1", "--prompt", text)
    first, setting = requests[0][0].overrides
    assert first == "seed=1"
    name, _, value = setting.partition("=")
    assert (name, yaml.safe_load(value)) == ("prompt", text)


def test_the_options_of_evaluate_are_parameters(requests):
    options = ["--tasks", "piqa, a:b", "--data", "x: y.jsonl", "--num-fewshot", "0", "--limit", "7"]
    run("evaluate", "a.yml", "--set", "seed=1", *options, "--include-path", "C")
    ((request, _),) = requests
    found = dict(one.split("=", 1) for one in request.overrides)
    assert {name: yaml.safe_load(value) for name, value in found.items()} == {
        "seed": 1,
        "eval_tasks": ["piqa", "a:b"],
        "eval_data": "x: y.jsonl",
        "eval_include_path": "C",
        "eval_num_fewshot": 0,
        "eval_limit": 7,
    }


def test_tasks_without_a_name_are_refused(requests):
    done = run("evaluate", "a.yml", "--tasks", " , ")
    assert done.exit_code == 2
    assert "names no task" in done.output
    assert requests == []
