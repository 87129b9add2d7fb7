"""Reading of configuration files."""

import pytest
import yaml

from neox_config import load_config
from neox_config.errors import ConfigError
from neox_config.read import reading
from support.refusals import refused


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("min-lr: 1e-8", "min_lr", 1e-8),
        ("min_lr: 0.00_01", "min_lr", 1e-4),
        ("train-batch-size: 1_000", "train_batch_size", 1000),
        ("zero_optimization: {reduce_bucket_size: 5e8}", "zero_optimization.reduce_bucket_size", 500_000_000),
        (
            'zero_optimization: {reduce_bucket_size: "5e8"}',
            "zero_optimization.reduce_bucket_size",
            500_000_000,
        ),
        ('seed: "0123"', "seed", 123),
        ("warmup: 00.5e-1", "warmup", 0.05),
        ("seed: 7.0", "seed", 7),
        ("min-lr: 0", "min_lr", 0.0),
        ("no-weight-tying: True", "no_weight_tying", True),
        ("no_weight_tying: true", "no_weight_tying", True),
        ('no_weight_tying: "true"', "no_weight_tying", True),
        ("norm: RMSNorm", "norm", "rmsnorm"),
        ("pos-emb: none", "pos_emb", "none"),
        ("save: ~\nseed: null", "seed", 1234),
        ("split: 969,30,1", "split", "969,30,1"),
        ('split: "949, 50,1"', "split", "949, 50,1"),
        ("data-path: 2020-01-02", "data_path", "2020-01-02"),
        ("data-path: 1:30", "data_path", "1:30"),
        (
            "train-data-paths: [a, b]\nvalid-data-paths: [c]\ntest-data-paths: [d]",
            "train_data_paths",
            ("a", "b"),
        ),
        ('{\n\t"log-interval": 7, # seven\n\t"seed": 5,\n}', "log_interval", 7),
        ('{"log_interval":7}', "log_interval", 7),
        ("\ufefflog-interval: 7", "log_interval", 7),
        ("", "log_interval", 100),
        ("# nothing\n", "log_interval", 100),
        ("fp16: {}", "fp16.enabled", False),
        ("fp16: null", "fp16.enabled", False),
        ("fp16: &half {enabled: false, hysteresis: 3}\nbf16: {enabled: true}", "fp16.hysteresis", 3),
        ("fp16: {<<: {hysteresis: 3, loss_scale: 4}, hysteresis: 5}", "fp16.hysteresis", 5),
        ("fp16: {<<: {hysteresis: 3, loss_scale: 4}, hysteresis: 5}", "fp16.loss_scale", 4.0),
        ("optimizer: {type: SGD, params: {momentum: 9e-1}}", "optimizer.params.momentum", 0.9),
    ],
)
def test_values_are_read_as_people_write_them(minimal, text, name, value):
    more = minimal.with_name("more.yml")
    more.write_text(text, encoding="utf-8")
    if "SGD" in text:
        minimal.write_text(minimal.read_text().replace("type: Adam, ", ""))
    found = load_config([minimal, more]).value_of(name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed: 1\nseed: 2", "line 2  seed\n          is given twice in this file, in lines 1 and 2"),
        ("log-interval: 1\nlog_interval: 1", "is given twice in this file, in lines 1 and 2"),
        ("fp16:\n  enabled: true\n  enabled: true", "is given twice in this file, in lines 2 and 3"),
        ("seed: [1,", "is not valid YAML"),
        ("{\n'seed': 1\n'save': x\n}", "line 3  'save': x\n          is not valid YAML"),
        ("seed: 1\n\tsave: x", "replace the tab with spaces"),
        ("- seed", "is not a mapping of parameters"),
        ("just words", "is not a mapping of parameters"),
        ("--- {}\n--- {}", "is not valid YAML"),
        (
            "save: !!python/object/apply:os.system [x]",
            "!!python/object/apply:os.system\n          is a YAML tag",
        ),
        ("save: !thing x", "is a YAML tag, and tags are not supported"),
        ("save: !!binary aGk=", "!!binary"),
        ("save: &a [*a]", "is nested too deeply"),
        ("save: " + "[" * 50 + "]" * 50, "is nested too deeply"),
        ("save: " + "[" * 1000, "is nested too deeply"),
        ("? [seed]\n: 1", "is not a parameter name"),
        ("'': 1", "is not a parameter name"),
        (
            "seed: \x00",
            'line 1  "seed: \\u0000"\n          is not valid YAML: it contains the character U+0000',
        ),
        ("seed: 1\nsave: \x1b[0m", 'line 2  "save: \\u001b[0m"\n          is not valid YAML: it contains'),
        (
            "log-interval: 5\nseed: 0777",
            "line 2  0777\n          starts with a zero: YAML 1.2 reads a decimal number, "
            "YAML 1.1 an octal one\n"
            "          write it without the zero, or put text in quotes",
        ),
        ("seed: 0_8", "starts with a zero: YAML 1.2 reads a decimal number"),
        ("seed: 07", "write it without the zero"),
        ("seed: 0" + "7" * 6000, "must be a whole number"),
        ("attention-config: [[[global], 010]]", "write it without the zero"),
        ("attention-config: {a: [+010]}", "write it without the zero"),
        ("seed: 0o777", "must be a whole number"),
        ("save: x\nattention-config: " + "[" * 5000 + "]" * 5000, "it is nested too deeply"),
        ("save:\n" + "".join(" " * deep + "a:\n" for deep in range(1, 500)), "line 202  a:"),
        ("save: *nothing", "is not valid YAML"),
        ("fp16: {<<: 5}", "does not refer to a mapping"),
    ],
)
def test_syntax_errors_are_reported_with_their_line(load, text, sentence):
    with pytest.raises(ConfigError) as found:
        load(text)
    assert sentence in str(found.value)
    assert "is missing" not in str(found.value)


def test_a_byte_that_is_no_text_is_reported_with_its_place(minimal):
    more = minimal.with_name("more.yml")
    more.write_bytes(b"seed: 1\n\nsave: \xff\n")
    with refused(ConfigError, "0xff", "position 15"):
        load_config([minimal, more])


def test_brackets_are_counted_before_they_cost_time():
    """Scanning 5,000 open brackets would call this for each of them."""
    calls = []

    class Counted(reading._Loader):
        def stale_possible_simple_keys(self):
            calls.append(1)
            super().stale_possible_simple_keys()

    with refused(yaml.MarkedYAMLError, "nested too deeply"):
        yaml.compose("[" * 5000, Loader=Counted)
    assert len(calls) < 1000


def test_an_alias_bomb_is_refused(load):
    levels = ["a: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with refused(ConfigError, "than 100,000"):
        load("\n".join(levels))


def test_binary_file_is_refused(minimal):
    more = minimal.with_name("more.yml")
    more.write_bytes(b"seed: \xff\xfe")
    with refused(ConfigError, "YAML", "UTF-8"):
        load_config([minimal, more])


def test_a_file_of_megabytes_is_refused(minimal):
    more = minimal.with_name("more.yml")
    more.write_bytes(b"# " + b"x" * 1_100_000)
    with refused(ConfigError, "than 1,048,576"):
        load_config([minimal, more])


def test_the_ending_and_the_folder_may_be_given_apart(minimal):
    minimal.with_name("b.yaml").write_text("seed: 5")
    config = load_config(["minimal", "b"], directory=minimal.parent)
    assert config.training.seed == 5
    assert config.files == (str(minimal), str(minimal.with_name("b.yaml")))


def test_a_missing_file_is_named_with_its_neighbour(minimal):
    with pytest.raises(ConfigError) as found:
        load_config([minimal.with_name("minimol")])
    assert str(found.value) == (
        f"{minimal.with_name('minimol')}: 1 problem\n\n  file not found\n    did you mean {minimal}?"
    )


@pytest.mark.parametrize(
    ("name", "neighbour", "remedy"),
    [
        (
            "nonexist.yml",
            "conftest.py",
            "check the path (relative to the working directory, or to FOLDER with -d FOLDER)",
        ),
        (
            "nonexist",
            "nonexistent",
            "check the path (relative to the working directory, or to FOLDER with -d FOLDER)",
        ),
        ("nonexist.yml", "nonexit.json", "did you mean {}?"),
    ],
)
def test_only_a_neighbour_that_may_be_a_configuration_is_named(tmp_path, name, neighbour, remedy):
    (tmp_path / neighbour).touch()
    with pytest.raises(ConfigError) as found:
        load_config([tmp_path / name])
    assert str(found.value).splitlines()[-1].strip() == remedy.format(tmp_path / neighbour)


def test_folder_in_place_of_a_file_is_answered_with_how_to_name_its_files(tmp_path):
    (tmp_path / "model.yml").touch()
    with refused(ConfigError, tmp_path, "FILE"):
        load_config([tmp_path])


def test_a_prompt_may_have_several_lines(minimal):
    assert load_config([minimal], overrides=['prompt="user:\\n\\thi"']).generation.prompt == "user:\n\thi"
    for given in (r'prompt="\e[31m"', r'save="a\nb"'):
        with refused(ConfigError, "or a tab"):
            load_config([minimal], overrides=[given])


@pytest.mark.parametrize("content", ["", "# a comment\n"])
def test_an_empty_configuration_is_called_empty(tmp_path, content):
    (tmp_path / "empty.yml").write_text(content)
    with pytest.raises(ConfigError) as refusal:
        load_config([tmp_path / "empty.yml"])
    (problem,) = refusal.value.problems
    assert (problem.what, problem.place.file) == ("is empty", str(tmp_path / "empty.yml"))
    assert problem.remedy.endswith("neox-launch init --data FOLDER")
    with refused(ConfigError, "hidden-size"):
        load_config([tmp_path / "empty.yml"], overrides=["num-layers=2"])
