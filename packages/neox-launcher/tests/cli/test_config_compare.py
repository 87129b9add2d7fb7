"""The commands `neox-config diff`, `schedule` and `check --files`, and the origins of implied values."""

import struct
import sys

import pytest
from click.testing import CliRunner

from neox_config import load_config
from neox_config.derive.optimizer_arguments import own_arguments
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.problems import in_words
from neox_launcher.cli.config import main
from support.refusals import shows


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def changed(minimal, **values):
    path = minimal.with_name("changed.yml")
    rest = "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in values.items())
    path.write_text(minimal.read_text() + rest)
    return path


def test_two_equal_configurations_do_not_differ(minimal):
    result = run("diff", minimal, changed(minimal))
    assert (result.exit_code, result.stdout) == (0, "")


def test_differences_are_printed_with_their_origin(minimal, snapshot):
    other = changed(minimal, gradient_accumulation_steps=4)
    result = run("diff", minimal, other)
    assert result.exit_code == 1
    assert result.stdout.replace(str(minimal.parent), "") == snapshot


@pytest.mark.parametrize(
    ("override", "shown", "origin"),
    [
        ("finetune=true", "no_load_optim: true", "follows from finetune: true"),
        ("lazy-mpu-init=true", "use_cpu_initialization: true", "follows from lazy_mpu_init: true"),
    ],
)
def test_the_origin_of_an_implied_value_is_shown(minimal, override, shown, origin):
    rows = run("show", minimal, "--set", override).stdout.splitlines()
    found = [row for row in rows if row.strip().startswith(shown)]
    assert found
    assert all(row.endswith(f"# {origin}") for row in found)


def test_a_derived_value_names_its_rule(minimal):
    shown = run("show", minimal, "--devices", 4).stdout
    assert shows(shown, "world_size", "model_parallel_size", "pipe_parallel_size")


HEADER = "iteration  learning rate  batch size  sequence length"
CYCLE = (
    "scheduler={type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.5, cycle_first_step_size: 4, "
    "cycle_min_mom: 0.5}}"
)
LENGTHS = (
    "curriculum_learning={enabled: true, curriculum_type: seqlen, min_difficulty: 8, max_difficulty: 32, "
    "schedule_type: fixed_discrete, schedule_config: {difficulty: [8, 32], max_step: [3]}}"
)


def test_the_schedule_is_printed(minimal):
    shown = run("schedule", minimal, "--set", "warmup=0.2", "--points", 3).stdout
    table = f"{HEADER}\n" + "".join(
        f"{update:>9}  {rate:<13}  2           32\n"
        for update, rate in ((0, "0.0005"), (2, "0.001"), (4, "0.00075"), (9, "0.000125"))
    )
    assert shown == table


def test_one_iteration_of_the_schedule(minimal):
    shown = run("schedule", minimal, "--set", "warmup=0", "--at", 5).stdout
    assert shown == f"{HEADER}\n        5  0.0005         2           32\n"


def test_a_changing_momentum_and_sequence_length_are_printed(minimal):
    options = [option for text in (CYCLE, LENGTHS) for option in ("--set", text)]
    shown = run("schedule", minimal, *options, "--devices", 4, "--points", 2).stdout
    assert [line.split() for line in shown.splitlines()[1:5]] == [
        ["0", "0.1", "8", "8", "0.5"],
        ["4", "0.5", "8", "32", "0.5"],
        ["8", "0.1", "8", "32", "0.9"],
        ["9", "0.1", "8", "32", "0.9"],
    ]
    assert shown.splitlines()[0] == f"{HEADER}  momentum"


def test_the_schedule_is_drawn(minimal, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "schedule.png"
    result = run("schedule", minimal, "--set", CYCLE, "--output", picture)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"\nwrote {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    # Four charts, one below the other.
    assert (width, height) == (960, 1056)


def test_a_chart_that_cannot_be_drawn_or_written_is_an_error_without_output(minimal, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = run("schedule", minimal, "--plot", tmp_path / "none" / "schedule.png")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "schedule.png cannot be" in result.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("schedule", minimal, "--plot", tmp_path / "schedule.png")
    assert (result.exit_code, result.stdout) == (1, "")
    assert shows(result.stderr, '"neox-launcher[plot]"', "--output")
    assert list(tmp_path.glob("*.png")) == []


METRIC = (
    "{index_to_sample_path: x, index_to_metric_path: x, difficulty_type: value, clustering_type: "
    "schedule_based, min_difficulty: 10, max_difficulty: 50, schedule_type: fixed_linear, schedule_config: "
    "{total_curriculum_step: 4, difficulty_step: 10}}"
)


def test_the_difficulty_of_a_curriculum_is_printed(minimal):
    sampling = (
        "{enabled: true, curriculum_learning: {enabled: true, data_cluster_path: x, curriculum_metrics: "
    )
    efficiency = f"data_efficiency={{enabled: true, data_sampling: {sampling}{{rarity: {METRIC}}}}}}}}}"
    shown = run("schedule", minimal, "--set", efficiency, "--points", 3).stdout.splitlines()
    assert shown[0].endswith("largest rarity")
    assert [line.split()[-1] for line in shown[1:4]] == ["20", "50", "50"]


def test_files_are_checked_on_request(minimal):
    assert run("check", minimal, "--set", "data-path=nowhere").exit_code == 0
    result = run("check", minimal, "--set", "data-path=nowhere", "--files")
    assert result.exit_code == 2
    assert "nowhere.idx does not" in result.stderr


OWN_DEFAULTS = [facts.name for facts in OPTIMIZER_FACTS.values() if facts.arguments]


@pytest.mark.parametrize("kind", OWN_DEFAULTS)
@pytest.mark.parametrize("command", [("show",), ("show", "--changed")], ids=" ".join)
def test_a_shown_optimizer_is_read_with_the_values_that_it_uses(minimal, kind, command):
    """Not with the defaults of the declared parameters, which are Adam's."""
    minimal.write_text(minimal.read_text().replace("type: Adam", f"type: {kind}"))
    shown = minimal.with_name("shown.yml")
    shown.write_text(run(*command, minimal).stdout)
    values = [own_arguments(load_config([path])) for path in (minimal, shown)]
    plain = [{name: in_words(value) for name, value in each.items()} for each in values]
    assert plain[0] == plain[1]
    assert run("diff", minimal, shown).stdout == ""


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("Lion", ["betas: [0.9, 0.99]"]),
        ("SM3", ["momentum: 0.0", "beta: 0.0", "eps: 1e-30"]),
        ("madgrad_wd", ["momentum: 0.9", "eps: 1e-06"]),
    ],
)
def test_shown_defaults_are_those_of_the_optimizer(minimal, kind, lines):
    shown = run("show", minimal, "--set", f"optimizer.type={kind}").stdout
    rows = [" ".join(row.split()) for row in shown.splitlines()]
    assert [line for line in lines if f"{line} # default" not in rows] == []


def test_a_changed_optimizer_shows_values_that_equal_the_defaults_of_adam(minimal):
    sets = ("--set", "optimizer.type=Lion", "--set", "optimizer.params.betas=[0.9, 0.999]")
    assert "betas: [0.9, 0.999]" in run("show", "--changed", minimal, *sets).stdout
