"""`~` and variables in paths: expanded once, in every parameter that is a path and in no other."""

import json
import os
import pwd
import re

import pytest
import yaml

from neox_config import ConfigError, Text, decode_resolved, encode_resolved, load_config, resolve
from neox_config.describe.display import show_config
from neox_config.schema.config import all_parameters, as_written
from neox_config.schema.paths import PathError, expand_path, written_paths
from support.refusals import refused

MINIMAL = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 32}
MINIMAL |= {"max-position-embeddings": 32, "train-micro-batch-size-per-gpu": 1, "train-iters": 10}
MINIMAL |= {"optimizer": {"params": {"lr": 0.01}}, "save-interval": 5}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOME": "/home/me", "SCRATCH": "/scratch/$HOME", "EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET", raising=False)


def load(settings: dict, **changes):
    return load_config([], texts=[Text(yaml.safe_dump(MINIMAL | settings), "a.yml")], **changes)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~", "/home/me"),
        ("~/ck", "/home/me/ck"),
        ("~root/ck", f"{pwd.getpwnam('root').pw_dir}/ck"),
        ("$SCRATCH/ck", "/scratch/$HOME/ck"),
        ("${SCRATCH}_2/ck", "/scratch/$HOME_2/ck"),
        ("~/$SCRATCH", "/home/me//scratch/$HOME"),
        ("a/${EMPTY}b$EMPTY/c", "a/b/c"),
        ("a$$b", "a$b"),
        ("$$HOME", "$HOME"),
        ("$$$HOME$$", "$/home/me$"),
        ("a/~/b~", "a/~/b~"),
        ("./~/ck", "./~/ck"),
        ("", ""),
        ("a b/ü\udcff", "a b/ü\udcff"),
        ("s3://bucket/$SCRATCH/~", "s3://bucket/$SCRATCH/~"),
    ],
)
def test_a_path_is_expanded_once(text: str, path: str) -> None:
    assert expand_path(text) == path
    assert expand_path(written_paths(path)).removeprefix("./") == path.removeprefix("./")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("$UNSET/ck", "contains $UNSET, which"),
        ("~/a${UNSET}", "contains $UNSET, which"),
        ("$HOME_2", "$HOME_2, which is"),
        (
            "~no_such_user/ck",
            "~no_such_user, which is",
        ),
        ("~$HOME/ck", "begins with ~$HOME"),
        ("a$", "$NAME or ${NAME}"),
        ("$(pwd)/ck", "without the name"),
        ("${UNSET:-x}", "without the name"),
        ("${}/ck", "without the name"),
        ("$1", "without the name"),
    ],
)
def test_what_cannot_be_expanded_is_an_error(text: str, what: str) -> None:
    with refused(PathError, what):
        expand_path(text)


def test_the_home_of_the_account_is_used_without_the_variable(monkeypatch) -> None:
    monkeypatch.delenv("HOME")
    assert expand_path("~/ck") == os.path.join(pwd.getpwuid(os.getuid()).pw_dir, "ck")


_METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
TYPES = ("text (path)", "list of paths")
PATHS = {each.name: each.type for each in all_parameters() if each.type in TYPES}
# What must be given with some of them.
WITH = {
    "hf_export": {"save": "s"},
    **{f"{part}_data_paths": {f"{each}_data_paths": ["a", "b"] for each in ("train", "valid")}
       for part in ("train", "valid", "test")},
    **{f"{part}_label_data_paths": {f"{each}_data_paths": ["a", "b"] for each in ("train", "valid", "test")}
       for part in ("train", "valid", "test")},
    **{f"{_METRICS}.<metric>.index_to_{each}_path": {
        "data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"m": {
            "index_to_sample_path": "a", "index_to_metric_path": "a", "difficulty_type": "value",
            "clustering_type": "single_cluster", "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1},
            "min_difficulty": 1, "max_difficulty": 2}}}}}}
       for each in ("sample", "metric")},
    **{f"zero_optimization.offload_{each}.nvme_path": {
        "zero_optimization": {"stage": 3, f"offload_{each}": {"device": "nvme"}}}
       for each in ("param", "optimizer")},
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_every_path_is_expanded(name: str) -> None:
    is_list = PATHS[name] == "list of paths"
    value = ["~/$SCRATCH/a", "b$$"] if is_list else "~/$SCRATCH/a"
    settings, *names = MINIMAL | WITH.get(name, {}), *name.replace("<metric>", "m").split(".")
    settings = at = json.loads(json.dumps(settings))
    for block in names[:-1]:
        at = at.setdefault(block, {})
    at[names[-1]] = value
    found = load(settings).value_of(".".join(names))
    assert found == (("/home/me//scratch/$HOME/a", "b$") if is_list else "/home/me//scratch/$HOME/a")


def test_no_parameter_that_names_a_file_or_a_folder_has_another_type() -> None:
    called = re.compile(r"(^|[._])(path|paths|dir|file|folder)$")
    described = re.compile(
        r"(Output |Text )?(Director(y|ies)|Folders?|Files?|Prefix(es)?|Vocabulary) |.* file\.$"
    )
    others = {"comment", "lora_target_modules"}
    wrong = [
        each.name
        for each in all_parameters()
        if (called.search(each.name) or described.match(each.doc))
        and each.type not in TYPES
        and ("text" in each.type or each.type == "list")
        and each.name not in others
    ]
    # Prefixes and names that are joined to something else.
    assert wrong == ["compression_training.layer_reduction.module_name_prefix"]
    assert len(PATHS) == 42


def test_texts_that_are_no_paths_are_not_expanded() -> None:
    settings = {"prompt": "~ costs $5 or $UNSET", "wandb-group": "~/$HOME", "remote-setup": "cd $UNSET"}
    config = load(settings | {"checkpoint-store": "s3://a/$UNSET", "save": "s"})
    assert config.generation.prompt == "~ costs $5 or $UNSET"
    assert config.logging.wandb_group == "~/$HOME"
    assert config.launch.remote_setup == "cd $UNSET"
    assert config.checkpoint.checkpoint_store == "s3://a/$UNSET"


def test_an_error_names_the_parameter_and_the_line(tmp_path) -> None:
    file = tmp_path / "a.yml"
    file.write_text(yaml.safe_dump(MINIMAL) + "save: $UNSET/ck\ndata-path: ~/c\nlog-dir: ~nobody_here/l\n")
    with pytest.raises(ConfigError) as caught:
        load_config([file])
    found = [(each.name, each.value, each.place.line) for each in caught.value.problems]
    assert found == [("save", "$UNSET/ck", 12), ("log_dir", "~nobody_here/l", 14)]
    with refused(ConfigError, "--set save"):
        load({}, overrides=["save=$UNSET/ck"])


def test_settings_of_the_command_line_are_expanded_too() -> None:
    config = load({}, overrides=["save=~/ck", "flops_profiler.output_file=$SCRATCH/x"])
    assert config.checkpoint.save == "/home/me/ck"
    assert config.engine.flops_profiler.output_file == "/scratch/$HOME/x"


def test_other_hosts_and_records_have_the_expanded_path(monkeypatch) -> None:
    config = load({"save": "~/$SCRATCH/$$x", "data-path": "$SCRATCH/c"})
    sent = encode_resolved(resolve(config, devices=1))
    for name in ("HOME", "SCRATCH"):
        monkeypatch.delenv(name)
    received = decode_resolved(sent).config
    assert received.checkpoint.save == "/home/me//scratch/$HOME/$x"
    assert received.data.data_path == "/scratch/$HOME/c"


def test_what_is_written_as_a_configuration_is_read_as_the_same_path() -> None:
    config = load({"save": "$SCRATCH/$$x", "log-dir": "./~x", "train-data-paths": ["a$$", "b"],
                   "flops-profiler": {"output_file": "$$n"}, "eval-iters": 0})  # fmt: skip
    shown = show_config(config, changed=True)
    again = load_config([], texts=[Text(shown, "shown.yml")])
    written = {name: value for section in config.given().values() for name, value in section.items()}
    from_dict = load_config([], texts=[Text(yaml.safe_dump(as_written(written)), "written.yml")])
    for each in (again, from_dict):
        assert each.checkpoint.save == "/scratch/$HOME/$x"
        assert each.logging.log_dir == "./~x"
        assert each.data.train_data_paths == ("a$", "b")
        assert each.engine.flops_profiler.output_file == "$n"
