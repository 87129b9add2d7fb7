"""train-epochs: the number of iterations is computed from the index of the data."""

import struct

import pytest

from neox_config import load_config
from neox_config.errors import ConfigError
from neox_launcher.plan.dataset_files import count_tokens
from neox_launcher.plan.epochs import (
    DataNotReadableError,
    config_for,
    samples_of_passes,
    with_iterations,
)
from neox_launcher.plan.planning import Request, plan_launch
from support.refusals import refused, shows

SIZES = (40, 0, 25, 35, 100)


@pytest.fixture
def data(tmp_path):
    """Write the files of a dataset of five documents; return its path."""
    offsets = [2 * sum(SIZES[:i]) for i in range(len(SIZES))]
    starts = range(len(SIZES) + 1)
    content = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(SIZES), len(starts))
    content += struct.pack(f"<{len(SIZES)}i", *SIZES)
    content += struct.pack(f"<{len(SIZES)}q", *offsets) + struct.pack(f"<{len(starts)}q", *starts)
    (tmp_path / "corpus.idx").write_bytes(content)
    (tmp_path / "corpus.bin").write_bytes(bytes(2 * sum(SIZES)))
    return str(tmp_path / "corpus")


@pytest.fixture
def load_epochs(minimal, data):
    """Load the minimal configuration with train-epochs in place of train-iters."""

    def load_it(text="", *, epochs=2, **named):
        more = minimal.with_name("more.yml")
        more.write_text(f"train-epochs: {epochs}\nsplit: 80,20,0\n{text}\n")
        values = {"train-iters": "null", "seq-length": "8", "data-path": data}
        values |= {"train-micro-batch-size-per-gpu": "2", **named}
        return load_config([minimal, more], overrides=[f"{name}={value}" for name, value in values.items()])

    return load_it


def test_the_tokens_of_the_first_documents_are_counted(data):
    assert count_tokens(data, int) == 200
    assert count_tokens(data, lambda count: count - 1) == 100


@pytest.mark.parametrize(
    ("epochs", "order", "devices", "expected"),
    [
        # 100 tokens: floor(99 / 8) = 12 samples in one pass, floor(299 / 8) = 37 in three, or 3 x 12.
        (1, "gpt_neox", 1, 6),
        (3, "gpt_neox", 1, 18),
        (3, "gpt_neox", 2, 9),
        (1, "lazy", 1, 6),
        (7, "gpt_neox", 1, 43),
        (7, "lazy", 1, 42),
    ],
)
def test_the_iterations_are_whole_batches_of_the_passes(load_epochs, epochs, order, devices, expected):
    config = with_iterations(load_epochs(f"sample-order: {order}", epochs=epochs), devices=devices)
    assert config.training.iterations == expected
    assert config.training.train_epochs == epochs


def test_given_iterations_stay(load):
    config = load()
    assert with_iterations(config, devices=1) is config


def test_no_token_is_read_more_often_than_the_passes():
    for tokens in range(2, 60):
        for epochs in (1, 2, 5):
            samples = samples_of_passes(epochs, tokens, seq_length=8, is_lazy=False)
            assert 8 * samples + 1 <= epochs * tokens < 8 * (samples + 1) + 1


def refusal(config):
    with pytest.raises(ConfigError) as found:
        with_iterations(config, devices=1)
    [problem] = found.value.problems
    return problem


def test_data_that_cannot_be_read_is_named(load_epochs, tmp_path):
    problem = refusal(load_epochs(**{"data-path": tmp_path / "absent"}))
    assert (problem.name, problem.place.line) == ("train_epochs", 1)
    assert "index cannot be" in problem.what
    assert str(tmp_path / "absent.idx") in problem.what
    assert shows(problem.remedy, "set train-iters instead")
    (tmp_path / "absent.idx").write_bytes(b"MMIDIDX\0\0 short")
    assert "after 15 bytes" in refusal(load_epochs(**{"data-path": tmp_path / "absent"})).what


def test_the_doctor_does_not_read_the_data(minimal, tmp_path):
    values = ("train-iters=null", "train-epochs=2", f"data-path={tmp_path / 'absent'}")

    def plan_of(program):
        request = Request(program=program, paths=(str(minimal),), overrides=values)
        return plan_launch(request, gpus=0, environment={})

    assert plan_of("doctor").resolved.config.training.iterations == 1
    with refused(ConfigError, "cannot be read"):
        plan_of("train")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("generate", ""),
        ("serve", ""),
        ("evaluate", "eval-data: texts.txt"),
        ("evaluate", "eval-tasks: [piqa]"),
    ],
)
def test_programs_that_read_no_training_data_do_not_require_it(load_epochs, tmp_path, program, text):
    config = load_epochs(text, **{"data-path": tmp_path / "absent"})
    assert config_for(program, config, devices=1).training.iterations == 1


@pytest.mark.parametrize("program", ["train", "evaluate", None])
def test_programs_that_read_training_data_require_it(load_epochs, tmp_path, program):
    with refused(DataNotReadableError, "cannot be read"):
        config_for(program, load_epochs(**{"data-path": tmp_path / "absent"}), devices=1)


def test_evaluations_on_texts_have_the_iterations_where_the_data_is(load_epochs):
    config = load_epochs("eval-data: texts.txt", epochs=1)
    assert config_for("evaluate", config, devices=1).training.iterations == 6


def test_less_data_than_a_batch_is_refused(load_epochs):
    problem = refusal(load_epochs(epochs=1, **{"train-micro-batch-size-per-gpu": "13"}))
    assert shows(problem.what, "100 tokens", "12 samples", "reads 13")


@pytest.mark.parametrize(
    ("text", "name", "what"),
    [
        ("warmup-iters: 13", "warmup_iters", "is more than the 12 iterations of the schedule"),
        (
            "profile: true\nlog-dir: x\nprofile-step-start: 13\nprofile-step-stop: 14",
            "profile_step_start",
            "is after the last iteration, train-iters: 12",
        ),
    ],
)
def test_rules_about_the_iterations_are_checked_when_they_are_known(load_epochs, text, name, what):
    problem = refusal(load_epochs(text))
    assert problem.name == name
    assert what in problem.what
    assert problem.place.file.endswith("more.yml")
