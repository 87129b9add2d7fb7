"""The command `neox-launch init`, as far as it does not read texts; tests/integration has the rest."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from neox_config.atomic import atomic_write
from neox_config.errors import LaunchError
from neox_config.facts.checkpoints import MANIFEST
from neox_launcher.cli.launch import main
from neox_launcher.init.texts import Prepared
from support.refusals import shows


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture
def prepare(monkeypatch):
    """Record the command that prepares texts, and end it with an exit code."""
    calls = []

    def ended(command, **options):
        calls.append(command)
        return SimpleNamespace(returncode=calls_end["code"])

    calls_end = {"code": 7}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(subprocess, "run", ended)
    return SimpleNamespace(calls=calls, end=calls_end)


def test_texts_are_prepared_by_neox_data_whose_failure_is_reported(prepare, tmp_path):
    found = run("init", "--data", "my texts", "--data", "b", "--output", tmp_path / "x", "--vocab-size", 300)
    assert found.exit_code == 7
    assert found.output == ""  # neox-data has printed why.
    assert prepare.calls[-1] == [
        *(sys.executable, "-m", "neox_data", "prepare", "--output", str(tmp_path / "x")),
        *("--jsonl-key", "text", "--input=my texts", "--input=b", "--vocab-size", "300"),
    ]
    run("init", "-q", "--data", "b", "--output", tmp_path / "x")
    assert prepare.calls[-1][-1] == "--quiet"
    prepare.end["code"] = -9
    found = run("init", "--data", "b", "--output", tmp_path / "x")
    assert found.exit_code == 137
    assert "by signal 9" in found.output
    prepare.end["code"] = -2  # Ctrl-C, which nothing handles while a tokenizer is trained.
    found = run("init", "--data", "b", "--output", tmp_path / "x")
    assert (found.exit_code, "interrupted" in found.output) == (130, True)


@pytest.fixture
def terminal(monkeypatch):
    """Let standard input be a terminal."""
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("answers", "seconds"),
    [("{0}\n\n\n\n", None), ("{0}\nx\n1m\nsoon\n20m\n", 1200), ("{0}\nx\nauto\nauto\n", None)],
)
def test_the_questions_are_about_texts_folder_size_and_time(monkeypatch, tmp_path, answers, seconds):
    def chosen(candidates, prepared, devices, *, shorten):
        raise LaunchError(f"the time is {shorten and shorten(None)}")

    monkeypatch.setattr("neox_launcher.cli.init.prepare_texts", lambda *arguments, **options: None)
    monkeypatch.setattr("neox_launcher.cli.init.choose_training", chosen)
    monkeypatch.setattr("neox_launcher.cli.init.within", lambda training, seconds, measure: seconds)
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["init"], input=answers.format(tmp_path))
    questions = [
        "Folder or file",
        "Folder to write to [run]: ",
        "Size of the",
        "Longest time of the run",
    ]
    places = [found.output.index(question) for question in questions]
    assert places == sorted(places)
    assert found.output.endswith(f"the time is {seconds and float(seconds)}\n")
    assert (shows(found.output, "'soon'", "90s, 20m, 2h", "1d")) == bool(seconds)
    given = CliRunner().invoke(main, ["init", "--time", "auto"], input=answers.format(tmp_path))
    assert questions[-1] not in given.output


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_before_anything_is_done_promises_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["init"], input="")
    assert found.exit_code == 130
    assert found.stderr == "\ninterrupted\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["--data", "--output", "--tokenizer"])
def test_an_empty_path_is_refused_and_not_the_current_folder(prepare, name):
    found = run("init", *(word for each in ({"--data": "texts"} | {name: ""}).items() for word in each))
    assert found.exit_code == 2
    assert f"value for '{name}'" in found.output
    assert prepare.calls == []


def test_the_folder_of_a_model_stands_for_its_tokenizer(prepare, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    given = ("init", "--data", "texts", "--output", tmp_path / "x", "--tokenizer", model)
    found = run(*given)
    assert found.exit_code == 2
    assert shows(found.output, f"'--tokenizer': {model}", "tokenizer.json")
    (model / "tokenizer.json").touch()
    assert run(*given).exit_code == 7
    assert str(model / "tokenizer.json") in prepare.calls[-1]


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = run("init", "--data", "texts", "--output", tmp_path / "x")
    assert found.exit_code == 2
    assert "neox-data, which reads" in found.output


def test_an_existing_configuration_is_never_overwritten(prepare, tmp_path):
    (tmp_path / "config.yml").write_text("mine")
    found = run("init", "--data", "texts", "--output", tmp_path)
    assert found.exit_code == 2
    assert shows(found.output, f"{tmp_path}/config.yml", "neox-launch --config")
    assert (tmp_path / "config.yml").read_text() == "mine"
    assert not any("neox_data" in command for command in prepare.calls)


@pytest.fixture
def trained(tmp_path):
    """Write what an init and a run leave in a folder, as far as it is looked at."""
    result = {
        "data_path": "corpus",
        "split": "1,0,0",
        "vocab_file": str(tmp_path / "run" / "tokenizer.json"),
        "tokenizer_type": "HFTokenizer",
        "entries": 300,
        "tokens": {"train": 5, "valid": 0},
    }
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step1"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).touch()
    (tmp_path / "run" / "prepared.json").write_text(json.dumps(result))
    (tmp_path / "run" / "config.yml").write_text("mine")
    return tmp_path / "run"


@pytest.mark.parametrize("content", [b"", b'{"data_path": "cor', b"\xff", b"{}", b"[]", b'{"tokens": 5}'])
def test_a_damaged_result_of_neox_data_is_refused(prepare, trained, content):
    result = trained / "prepared.json"
    damaged = f"{result} is damaged, or was written by another version of neox-data; delete it, and start"
    if content == b'{"tokens": 5}':
        content = json.dumps(json.loads(result.read_bytes()) | {"tokens": 5}).encode()
    result.write_bytes(content)
    (trained / "config.yml").unlink()
    prepare.end["code"] = 0
    found = run("init", "--data", "texts", "--output", trained)
    assert (found.exit_code, found.stderr.startswith(damaged)) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init"], "no texts given; give --data FOLDER"),
        (["init", "--data", "x", "--size", "1m", "--model", "gpt2"], "--size and --model exclude each other"),
        (
            ["init", "--data", "x", "--model", "gpt3"],
            "gpt3 is not a model of the catalogue; did you mean gpt2?",
        ),
        (["init", "--model", "meta-llama/Llama-3.1-8B"], "; did you mean llama-3.1-8b?"),
        (["init", "--data", "x", "--time", "soon"], "'--time': 'soon' is not a time; write it as 90s, 20m"),
        (["init", "--data", "x", "--size", "3M", "--time", "5min", "--model", "gpt2"], "--size and --model"),
        (["init", "--data", "x", "--vocab-size", "257"], "257 is not in the range 258<=x<=16777216."),
        (["init", "--data", "x", "--vocab-size", "4k"], "'--vocab-size': '4k' is not a valid integer"),
        (["init", "--data", "x", "--device-memory", "much"], "'much' is not a memory size"),
        (["init", "--data", "x", "--output", "a\nb"], "contains characters that YAML cannot contain"),
        (["--set", "lr=1", "init", "--data", "x"], "init takes only its own options, after the word init"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_read(
    prepare, arguments, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = run(*arguments)
    assert found.exit_code == 2
    assert message in found.output
    assert not any("neox_data" in command for command in prepare.calls)


def test_ctrl_c_ends_with_130_and_says_how_to_continue(monkeypatch, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("neox_launcher.cli.init.prepare_texts", interrupted)
    found = run("init", "--data", "x", "--output", tmp_path / "x")
    assert found.exit_code == 130
    assert "the same command" in found.output


@pytest.mark.parametrize("is_written", [False, True])
def test_ctrl_c_promises_to_continue_until_the_configuration_is_written(
    chosen, monkeypatch, tmp_path, is_written
):
    @contextmanager
    def interrupted(path):
        if not is_written:
            raise KeyboardInterrupt
        with atomic_write(path) as file:
            yield file
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("neox_launcher.cli.init.atomic_write", interrupted)
        found = chosen("--size", "1m")
    promise = "" if is_written else "; the same command continues"
    assert (found.exit_code, found.stderr) == (130, f"\ninterrupted{promise}\n")
    assert (tmp_path / "x" / "config.yml").exists() == is_written
    again = chosen("--size", "1m")
    assert (again.exit_code, "config.yml exists" in again.stderr) == (2 * is_written, is_written)


def test_ctrl_c_while_texts_are_prepared_is_reported_once_by_the_process_that_prepares_them(
    prepare, monkeypatch, tmp_path
):
    """The terminal sends it to both."""

    def interrupted(command, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(returncode=130)

    monkeypatch.setattr(subprocess, "run", interrupted)
    before = signal.getsignal(signal.SIGINT)
    found = run("init", "--data", "x", "--output", tmp_path / "x")
    assert (found.exit_code, found.output.count("\n")) == (130, 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interruption_of_this_process_alone_ends_it_when_the_texts_are_prepared(
    prepare, monkeypatch, tmp_path
):
    def complete(command, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", complete)
    found = run("init", "--data", "x", "--output", tmp_path / "x")
    assert (found.exit_code, "interrupted" in found.output) == (130, True)
    assert not (tmp_path / "x" / "config.yml").exists()


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """Let the texts be prepared, and return a function that runs init for a GPU with little memory."""
    texts = Prepared(
        data_path="corpus",
        split="95,5,0",
        vocab_file="tokenizer.json",
        tokenizer_type="HFTokenizer",
        entries=512,
        training_tokens=10**9,
        validation_tokens=10**6,
    )
    monkeypatch.setattr("neox_launcher.cli.init.prepare_texts", lambda *arguments, **options: texts)
    monkeypatch.setattr("neox_launcher.cli.init.check_files", lambda config, *, program: [])
    (tmp_path / "x").mkdir()
    fixed = ("--data", "x", "--output", tmp_path / "x", "--devices", 1, "--device-memory", "1180MB")
    return lambda *arguments: run("init", *fixed, *arguments)


@pytest.mark.parametrize("duration", ["10m", "2s"])
def test_sizes_that_do_not_fit_into_the_memory_are_not_compared(chosen, tmp_path, duration):
    """A model of the catalogue fits, the next larger size does not."""
    refused = chosen("--size", "3m")
    assert (refused.exit_code, "3m does not" in refused.stderr) == (2, True)
    found = chosen("--model", "pythia-14m", "--time", duration)
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout.splitlines()[-1].startswith("  neox-launch --config ")
    assert (tmp_path / "x" / "config.yml").exists()
    assert ("learns nothing" in found.stdout) == (duration == "2s")


@pytest.mark.parametrize("duration", [None, "2s"])
def test_a_longer_time_is_advised_only_where_the_time_is_the_limit(chosen, monkeypatch, duration):
    monkeypatch.setattr("neox_launcher.cli.init.FEWEST_ITERATIONS", 10**9)
    options = () if duration is None else ("--time", duration)
    found = chosen("--model", "pythia-14m", *options).stdout
    assert ("a longer --time" in found) == (duration is not None)
    assert ("a shorter run" in found) == (duration is None)


def test_nothing_fails_after_the_configuration_is_written(chosen, monkeypatch, tmp_path):
    def failed(*arguments, **options):
        raise LaunchError("no duration")

    monkeypatch.setattr("neox_launcher.cli.init.describe_duration", failed)
    found = chosen("--size", "1m")
    assert (found.exit_code, found.output) == (2, "no duration\n")
    assert not (tmp_path / "x" / "config.yml").exists()


def test_an_unknown_option_is_not_answered_with_one_that_init_lacks():
    found = run("init", "--num-layers", "2")
    assert found.exit_code == 2
    assert "No such option" in found.stderr
    assert "--set" not in found.stderr


def refused_by_the_system(monkeypatch, folder):
    """Let every look at what is in a folder fail as for a user who may not read it; root may."""
    stat = os.stat

    def checked(path, *arguments, **options):
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", checked)


def test_an_output_that_this_user_may_not_see_is_one_sentence(prepare, tmp_path, monkeypatch):
    refused_by_the_system(monkeypatch, tmp_path)
    found = run("init", "--data", "texts", "--output", tmp_path / "x")
    assert found.exit_code == 2
    assert shows(found.output, f"{tmp_path}/x/config.yml")
    assert not prepare.calls


def test_an_output_with_a_name_that_is_too_long_is_one_sentence(prepare, tmp_path):
    found = run("init", "--data", "texts", "--output", tmp_path / ("x" * 300))
    assert found.exit_code == 2
    assert found.output.endswith("x/config.yml: File name too long; give another path\n")


@pytest.mark.usefixtures("terminal")
def test_a_path_that_is_typed_may_begin_with_the_home_folder(monkeypatch, prepare, tmp_path):
    (tmp_path / "texts").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    CliRunner().invoke(main, ["init", "--time", "auto"], input="~/texts\n~/out\n\n")
    assert f"--input={tmp_path}/texts" in prepare.calls[-1]
    assert str(tmp_path / "out") in prepare.calls[-1]


def test_an_output_that_is_no_folder_is_refused_before_texts_are_read(prepare):
    found = run("init", "--data", "texts", "--output", "/dev/full")
    assert found.exit_code == 2
    assert shows(found.output, "/dev/full", "--output")
    assert prepare.calls == []
