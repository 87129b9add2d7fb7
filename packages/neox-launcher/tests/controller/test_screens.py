"""The screens before and after a training: short, true, and with commands that can be typed."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from neox_launcher.controller.live_line import LiveState
from neox_launcher.controller.screens import Result, render_end, render_start
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.resources.host import Host
from neox_launcher.resources.world import World

SETTINGS = ("save=ck pt", "load=old", "save-interval=2", "keep-last-n-checkpoints=3", "log-dir=logs")
SAME = ("load=ck pt", "save-interval=2", "log-dir=logs")
DONE = Result(
    state=LiveState(metrics={"loss/train": 2.34567, "loss/validation": 2.5}),
    iteration=10,
    has_failed=False,
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


def rows(text):
    """The lines of a screen without the title: name -> value."""
    found = [line.strip().split("  ", 1) for line in text.plain.split("\n")[1:]]
    return {name: value.strip() for name, value in found}


def test_the_start_screen_shows_what_will_be_trained(plan):
    assert rows(render_start(plan, width=120)) == {
        "model": "3.42 M parameters: 4 layers, width 64, 4 heads",
        "workers": "2 CPU processes on this machine",
        "layout": "data 2 x pipe 1 x model 1, ZeRO stage 0, fp32",
        "batch": "4 x 32 tokens = micro-batch 2 x accumulation 1 x data 2",
        "training": "10 iterations, 1,280 tokens, optimizer Adam",
        "time": "shown after the first iterations",
        "starts from": "new weights (no checkpoint here in old)",
        "saves": "ck pt: every 2 iterations, at the end; last 3 kept",
        "evaluates": "every 1,000 iterations and at the end, 100 batches",
        "logs": "logs (metrics.jsonl)",
        "restarts": "at most 2",
        "stop with": "Ctrl-C: finishes the iteration and saves",
    }


def test_the_start_screen_fits_into_any_terminal(plan):
    hosts = tuple(Host(f"worker-{number}", tuple(range(8))) for number in range(100))
    plan = replace(plan, world=World(hosts=hosts, gpus=8), launcher="pdsh")
    for width in (20, 40, 79, 200):
        lines = render_start(plan, width=width).plain.split("\n")
        assert len(lines) <= 22
        assert max(map(cell_len, lines)) <= width
    shown = rows(render_start(plan, width=200))
    assert shown["workers"] == "800 GPUs on 100 hosts: worker-0, worker-1, worker-2 and 97 more"
    assert shown["time"].startswith("about ")
    assert shown["memory"].endswith(" GiB per GPU")


def test_the_start_screen_names_the_checkpoint_to_load(plan, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "latest").write_text("global_step6\n")
    assert rows(render_start(plan, width=120))["starts from"] == "old/global_step6"


@pytest.mark.usefixtures("checkpoint")
def test_the_end_screen_shows_results_and_commands(plan, request_, minimal):
    shown = rows(render_end(plan, request_, DONE, width=120))
    settings = f"{minimal} --set 'save=ck pt' --set load=old --set save-interval=2 "
    settings += "--set keep-last-n-checkpoints=3 --set log-dir=logs --set num-gpus=2 --set 'load=ck pt'"
    assert shown == {
        "iterations": "10 of 10",
        "loss": "2.3457",
        "validation loss": "2.5000",
        "duration": "1:15",
        "checkpoint": "ck pt/global_step10",
        "restarts": "1",
        "warnings": "3",
        "generate": f"neox-launch generate {settings}",
        "evaluate": f"neox-launch evaluate {settings}",
    }
    assert render_end(plan, request_, DONE, width=120).plain.startswith("neox-launch: finished\n")


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
    failed = replace(DONE, iteration=0, has_failed=True, state=LiveState())
    text = render_end(plan, request_, failed, width=120)
    shown = rows(text)
    assert text.plain.startswith("neox-launch: failed\n")
    assert (shown["iterations"], shown["checkpoint"]) == ("0 of 10", "none in ck pt on this machine")
    assert shown["start again"].startswith("neox-launch ")
    assert not {"resume", "generate", "loss", "report"} & shown.keys()
