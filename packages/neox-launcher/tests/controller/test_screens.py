"""The screens before and after a run: short, true, and with commands that can be typed."""

import json
import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from neox_config.errors import ConfigError
from neox_config.estimate.resolved import estimate_resolved
from neox_launcher.backends import BACKENDS
from neox_launcher.cli.launch import main
from neox_launcher.controller import screens
from neox_launcher.controller.screens import Result, render_end, render_start
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.plan.resuming import written_checkpoints
from neox_launcher.protocol.outcome import Failure, Outcome
from neox_launcher.resources.host import Host
from neox_launcher.resources.world import World
from support.refusals import shows

SETTINGS = ("save=ck pt", "load=old", "save-interval=2", "keep-last-n-checkpoints=3", "log-dir=logs")
SAME = ("load=ck pt", "save-interval=2", "log-dir=logs")
FAILED = Outcome(exit_code=1, first_failure=Failure(rank=0, host="a", time=0.0, message="lost"))
DONE = Result(
    outcome=Outcome(exit_code=0),
    metrics={"loss/train": 2.34567, "loss/validation": 2.5},
    iteration=10,
    seconds=75.0,
    restarts=1,
    warnings=3,
)


@pytest.fixture
def request_(minimal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Request(program="train", paths=(str(minimal),), overrides=(*SETTINGS, "num-gpus=2"))


@pytest.fixture
def plan(request_):
    return replace(plan_launch(request_, gpus=0), max_restarts=2)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "ck pt" / "global_step10"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    (folder.parent / "latest").write_text("global_step10\n")


def rows(text):
    """The lines of a screen without the title: name -> value."""
    found = [line.strip().split("  ", 1) for line in text.plain.split("\n")[1:]]
    return {name: value.strip() for name, value in found}


def test_the_start_screen_shows_what_will_be_trained(plan, snapshot):
    assert rows(render_start(plan, width=120)) == snapshot


def test_the_start_screen_fits_into_any_terminal(plan):
    hosts = tuple(Host(f"worker-{number}", tuple(range(8))) for number in range(100))
    plan = replace(plan, world=World(hosts=hosts, gpus=8), launcher="pdsh")
    for width in (20, 40, 79, 200):
        lines = render_start(plan, width=width).plain.split("\n")
        assert len(lines) <= 22
        assert max(map(cell_len, lines)) <= width
    shown = rows(render_start(plan, width=200))
    assert shows(shown["workers"], "800 GPUs", "100 hosts", "worker-0, worker-1, worker-2", "97 more")
    assert shown["time"].startswith("about ")
    assert shown["memory"].endswith(" GiB per GPU")


def test_the_start_screen_names_the_checkpoint_to_load(plan, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "latest").write_text("global_step6\n")
    assert rows(render_start(plan, width=120))["starts from"] == "old/global_step6"


@pytest.mark.usefixtures("checkpoint")
def test_the_end_screen_shows_results_and_commands(plan, request_, minimal, snapshot):
    text = render_end(plan, request_, DONE, width=120)
    assert rows(text) | {"generate": "", "evaluate": ""} == snapshot
    kept = [each for each in SETTINGS if not each.startswith("load=")]
    words = [word for each in (*kept, "num-gpus=2", "load=ck pt") for word in ("--set", each)]
    for name in ("generate", "evaluate"):
        assert rows(text)[name] == f"neox-launch {name} {shlex.join([str(minimal), *words])}"
    assert text.plain.startswith("neox-launch: finished\n")


@pytest.mark.usefixtures("checkpoint")
def test_a_command_that_would_evaluate_nothing_is_not_offered(request_):
    for given, is_offered in (("eval-iters=3", True), ("eval-iters=0", False)):
        request = replace(request_, overrides=(*request_.overrides, given))
        plan = plan_launch(request, gpus=0)
        assert ("evaluate" in rows(render_end(plan, request, DONE, width=120))) is is_offered


def test_both_screens_say_that_nothing_is_recorded_for_a_report(plan, request_):
    assert "report" not in rows(render_end(plan, request_, DONE, width=120))
    plan = plan_launch(replace(request_, overrides=("num-gpus=2", "log-dir=null")), gpus=0)
    assert shows(rows(render_start(plan, width=120))["logs"], "neox-report (log-dir is")
    assert shows(rows(render_end(plan, request_, DONE, width=120))["report"], "log-dir is not")


def test_warnings_without_a_log_folder_are_those_that_were_shown(request_):
    plan = plan_launch(replace(request_, overrides=("num-gpus=2",)), gpus=0)
    shown = rows(render_end(plan, request_, DONE, width=120))
    assert shows(shown["warnings"], "3", "0 marked", '"warning:"', '"error:"')


@pytest.mark.usefixtures("checkpoint")
def test_a_stopped_training_is_resumed_by_its_own_command(plan, request_, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").touch()
    request = replace(request_, overrides=(*SAME, "save=ck pt"), max_restarts=2, bind_cores=True)
    plan = plan_launch(request, gpus=0)
    stopped = replace(DONE, iteration=6)
    shown = rows(render_end(plan, request, stopped, width=20))
    assert shown["resume"].endswith("--set 'save=ck pt' --max-restarts 2 --bind-cores")
    assert shown["report"] == "neox-report logs"
    assert render_end(plan, request, stopped, width=80).plain.startswith("neox-launch: stopped\n")


def test_a_training_that_failed_without_a_checkpoint_is_started_again(plan, request_):
    failed = replace(DONE, iteration=0, outcome=FAILED, metrics={})
    text = render_end(plan, request_, failed, width=120)
    shown = rows(text)
    assert text.plain.startswith("neox-launch: failed\n")
    assert shown["iterations"] == "0 of 10"
    assert shown["checkpoint"].startswith("none in ck pt")
    assert shown["start again"].startswith("neox-launch ")
    assert not {"resume", "generate", "last loss", "report"} & shown.keys()


@pytest.mark.usefixtures("folder", "checkpoint")
@pytest.mark.parametrize("load", ["load=old", "load = old", "the same", "load='old'"])
def test_every_printed_command_is_accepted(minimal, tmp_path, monkeypatch, load):
    monkeypatch.setattr(type(BACKENDS["local"]), "missing", lambda self: None)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").touch()
    given = "load=ck pt" if load == "the same" else load
    settings = [given, "save=ck pt", "save-interval=2", "finetune=true", "num-gpus=1", "eval-iters=1"]
    settings = (
        *settings,
        "tokenizer-type=CharLevelTokenizer",
        *(f"{part}-data-paths=[data]" for part in ("train", "valid", "test")),
    )
    request = Request(program="train", paths=(str(minimal),), overrides=settings)
    shown = rows(render_end(plan_launch(request, gpus=0), request, replace(DONE, iteration=6), width=120))
    assert {"resume", "generate", "evaluate"} <= shown.keys()
    for name in ("resume", "generate", "evaluate"):
        words = shlex.split(shown[name])
        found = CliRunner().invoke(main, [*words[1:], "--dry-run=json"])
        assert found.exit_code == 0, found.stderr
        assert json.loads(found.stdout)["program"] == ("train" if name == "resume" else name)


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (("objective=masked",), {"evaluate"}),
        (("objective=ict", "ict-head-size=8"), {"evaluate", "index blocks"}),
        (("objective=ict", "ict-head-size=8", "block-data-path=found"), {"evaluate", "index blocks"}),
    ],
)
def test_only_models_that_continue_texts_are_shown_how_to_generate(request_, settings, names):
    request = replace(request_, overrides=(*request_.overrides, *settings))
    shown = rows(render_end(plan_launch(request, gpus=0), request, DONE, width=120))
    assert {"generate", "evaluate", "index blocks"} & shown.keys() == names
    if "index blocks" in names:
        words = shlex.split(shown["index blocks"])
        assert words[1] == "index-blocks"
        assert {"load=ck pt", settings[2] if settings[2:] else "block-data-path=ck pt/index"} <= set(words)


@pytest.mark.usefixtures("checkpoint")
def test_a_finetuning_is_resumed_with_all_states(request_):
    flags = ("finetune=true", "no-load-rng=true")
    request = replace(request_, overrides=(*request_.overrides, *flags))
    command = rows(render_end(plan_launch(request, gpus=0), request, replace(DONE, iteration=6), width=120))
    words = shlex.split(command["resume"])
    settings = tuple(words[number + 1] for number, word in enumerate(words) if word == "--set")
    section = plan_launch(replace(request, overrides=settings), gpus=0).resolved.config.checkpoint
    assert (section.load, section.save) == ("ck pt", "ck pt")
    assert (section.finetune, section.no_load_optim, section.no_load_rng) == (False, False, False)


def test_a_folder_whose_name_is_no_yaml_text_is_quoted(request_, tmp_path):
    (tmp_path / "12" / "global_step10").mkdir(parents=True)
    (tmp_path / "12" / "global_step10" / "manifest.json").touch()
    (tmp_path / "12" / "latest").write_text("global_step10")
    request = replace(request_, overrides=("save='12'", *request_.overrides[1:]))
    shown = rows(render_end(plan_launch(request, gpus=0), request, DONE, width=120))
    assert shlex.split(shown["generate"])[-1] == 'load="12"'


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(
    ("outcome", "title"),
    [
        (Outcome(exit_code=0), "finished"),
        (Outcome(exit_code=130, was_stopped=True), "stopped"),
        (FAILED, "failed"),
    ],
)
def test_a_training_whose_last_save_was_killed_is_not_finished(plan, request_, outcome, title):
    text = render_end(plan, request_, replace(DONE, outcome=outcome), width=120)
    assert text.plain.startswith(f"neox-launch: {title}\n")
    assert ("resume" in rows(text)) == (title != "finished")


@pytest.mark.usefixtures("checkpoint")
def test_the_checkpoint_is_the_one_to_resume_from(plan, request_, tmp_path):
    folder = tmp_path / "ck pt"
    (folder / "global_step4").mkdir()
    (folder / "global_step4" / "manifest.json").touch()
    (folder / "latest").write_text("global_step4\n")
    assert rows(render_end(plan, request_, DONE, width=120))["checkpoint"] == "ck pt/global_step4"
    nothing_new = replace(DONE, iteration=6, saved_before=written_checkpoints(folder))
    shown = rows(render_end(plan, request_, nothing_new, width=120))
    assert shows(shown["checkpoint"], "pt/global_step4 is older")
    assert "--set load=old" in shown["start again"]
    assert not {"resume", "generate", "evaluate"} & shown.keys()


def test_a_tokenizer_that_cannot_be_counted_leaves_rows_out(request_, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    tokenizer = ("tokenizer-type=HFTokenizer", "vocab-file=tokenizer.json")
    request = replace(request_, overrides=(*request_.overrides, *tokenizer))
    plan = plan_launch(request, gpus=0)
    with pytest.raises(ConfigError):
        estimate_resolved(plan.resolved)
    shown = rows(render_start(plan, width=120))
    assert shows(shown["model"], "4 layers", "64, 4")
    assert shows(shown["training"], "10 iterations", "1,280 tokens")
    assert "memory" not in shown


@pytest.mark.parametrize(
    ("setting", "source", "iterations"),
    [
        ("seed=1", "old/global_step6", 4),
        ("finetune=true", "the weights of old/global_step6, from iteration 0", 10),
        ("no-load-optim=true", "old/global_step6, without the optimizer's states", 4),
    ],
)
def test_the_start_screen_counts_the_iterations_that_remain(
    request_, tmp_path, monkeypatch, setting, source, iterations
):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "latest").write_text("global_step6\n")
    counted = []
    monkeypatch.setattr(screens, "_time", lambda result, number: counted.append(number) or "")
    plan = plan_launch(replace(request_, overrides=(*request_.overrides, setting)), gpus=2)
    assert rows(render_start(plan, width=120))["starts from"] == source
    assert counted == [iterations]


@pytest.mark.parametrize("is_complete", [True, False])
def test_only_a_checkpoint_that_can_be_loaded_is_offered(request_, tmp_path, is_complete):
    folder = tmp_path / "ck pt" / "global_step3"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("global_step3\n")
    if is_complete:
        (folder / "manifest.json").touch()
    request = replace(request_, overrides=(*SAME, "save=ck pt"))
    failed = replace(DONE, outcome=FAILED, saved_before=written_checkpoints(tmp_path / "ck pt"))
    shown = rows(render_end(plan_launch(request, gpus=0), request, failed, width=120))
    assert {"generate", "evaluate"} & shown.keys() == ({"generate", "evaluate"} if is_complete else set())


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(
    ("result", "iterations"),
    [
        # 10 iterations of 2 s after a start of 10 s: with another start, 90 - 10 s are left for 40 of them.
        ({"seconds": 30.0, "seconds_per_iteration": 2.0}, 50),
        # Without a speed, the start counts as iterations.
        ({"seconds": 30.0}, 40),
        ({"seconds": 97.0, "seconds_per_iteration": 2.0}, None),
        ({"seconds": 30.0, "saved_before": frozenset({("global_step2", 0.0)})}, None),
        ({"seconds": 30.0, "iteration": 6}, None),
    ],
)
def test_a_training_that_leaves_more_than_a_fifth_of_its_time_is_shown_how_to_use_it(
    request_, result, iterations
):
    request = replace(request_, overrides=(*SAME, "save=ck pt", "num-gpus=2", "planned-seconds=120"))
    found = replace(DONE, **result)
    shown = rows(render_end(plan_launch(request, gpus=0), request, found, width=120))
    if iterations is None:
        assert "extend" not in shown
        return
    words = shlex.split(shown["extend"])
    settings = tuple(words[number + 1] for number, word in enumerate(words) if word == "--set")
    assert plan_launch(replace(request, overrides=settings), gpus=0).resolved.config.training.iterations == (
        iterations
    )
    assert {"override-lr-scheduler=true", "planned-seconds=120"} <= set(settings)
    unplanned = replace(request, overrides=request.overrides[:-1])
    shown = rows(render_end(plan_launch(unplanned, gpus=0), unplanned, found, width=120))
    assert "extend" not in shown
