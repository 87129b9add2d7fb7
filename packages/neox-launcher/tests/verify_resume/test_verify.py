"""`neox-launch verify-resume`, with fake runs and comparisons."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_config.errors import LaunchError, NeoXError
from neox_launcher.cli.launch import main
from neox_launcher.plan import planning
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.protocol.kept_checkpoints import find_kept, latest_kept
from neox_launcher.protocol.outcome import Failure, Outcome
from neox_launcher.protocol.verification import Answer, Check, Comparison, Recording
from neox_launcher.verify_resume.report import render_answer
from neox_launcher.verify_resume.verify import VerifyRequest, verify_resume
from support.refusals import refused, shows


@pytest.fixture(autouse=True)
def _on_a_host_without_gpus(monkeypatch, can_train):
    monkeypatch.setattr(planning, "count_gpus", lambda environment: 0)


BASE = ("data-path=data", "tokenizer-type=CharLevelTokenizer", "hidden-dropout=0", "attention-dropout=0")
AGREES = Answer(checks=(Check(name="data", compared="8 samples"),))
DIFFERS = Answer(
    checks=(Check(name="losses", compared="2 steps", differing="1 of them", worst="1.0e-03 relative"),),
    first="loss of iteration 3: 2 instead of 1",
    explanation="why",
)


class Launches:
    """Fake launches that record their plans."""

    def __init__(self, answer=AGREES, *, failing=None, restores=True, ending_early=None, signalled=None):
        self.plans, self._answer, self._failing, self._restores = [], answer, failing, restores
        self._ending_early, self._signalled = ending_early, signalled
        self.seen = []

    def __call__(self, plan):
        self.plans.append(plan)
        if plan.program == "compare-trainings":
            return Outcome(exit_code=0, facts={0: self._answer.as_facts()})
        recording = Recording(**json.loads(plan.environment[Recording.VARIABLE]))
        self.seen.append((recording, Path(recording.folder).parents[1].is_dir()))
        if recording.snapshot is not None and self._restores:
            state = Path(recording.snapshot) / f"global_step{recording.iteration}"
            state.mkdir(parents=True)
            (state / "manifest.json").touch()
        if self._signalled is not None:
            os.kill(os.getpid(), self._signalled)
        if self._ending_early != len(self.plans):
            config = plan.resolved.config
            state = Path(config.checkpoint.save) / f"global_step{config.training.exit_interval}"
            state.mkdir(parents=True)
            (state / "manifest.json").touch()
        if self._failing == len(self.plans):
            failure = Failure(rank=0, host="h", time=0, message="it broke", exit_code=7)
            return Outcome(exit_code=7, first_failure=failure, num_failures=1)
        return Outcome(exit_code=0)


def verify(minimal, launches, *settings, **wanted):
    request = Request(program="train", paths=(str(minimal),), overrides=(*BASE, *settings))
    plan = plan_launch(request)
    return verify_resume(request, plan, VerifyRequest(**wanted), dry_run=None, run=launches)


def keep(folder, iteration):
    path = Path(folder) / f"global_step{iteration}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"contents": {"iteration": iteration}}))
    (Path(folder) / "latest").write_text(path.name)
    return path


def test_the_three_trainings_change_only_folders_and_the_last_iteration(minimal, folder):
    launches = Launches()
    settings = ("save=out", "save-interval=3", "keep-last-n-checkpoints=1", "log-dir=logs", "eval-iters=7")
    settings += ("load=out", "adlr-autoresume=true")
    outcome = verify(minimal, launches, *settings, steps=2)
    assert outcome.exit_code == 0
    configs = [plan.resolved.config for plan in launches.plans]
    assert [plan.program for plan in launches.plans] == ["train"] * 3 + ["compare-trainings"]
    assert [config.training.exit_interval for config in configs[:3]] == [4, 2, 4]
    assert [config.checkpoint.save_interval for config in configs[:3]] == [4, 2, 4]
    assert {config.training.train_iters for config in configs[:3]} == {10}
    assert {config.training.eval_iters for config in configs[:3]} == {0}
    assert {config.training.adlr_autoresume for config in configs[:3]} == {False}
    assert {config.checkpoint.keep_last_n_checkpoints for config in configs[:3]} == {None}
    assert [config.checkpoint.load for config in configs[:2]] == [None, None]
    assert configs[2].checkpoint.load == configs[1].checkpoint.save
    assert [(recording.iteration, recording.snapshot is None) for recording, _ in launches.seen] == [
        (2, False),
        (2, True),
        (2, False),
    ]
    assert all(exists for _, exists in launches.seen)
    used = {Path(config.checkpoint.save).parents[1] for config in configs[:3]}
    assert len(used) == 1
    assert not next(iter(used)).exists()
    assert not Path("out").exists()
    assert not Path("logs").exists()
    assert launches.plans[3].world.size == 1


def test_the_trainings_are_not_profiled(minimal, folder):
    launches = Launches()
    settings = ("log-dir=logs", "profile=true", "memory-profiling=true", "wall-clock-breakdown=true")
    settings += ("flops_profiler.enabled=true", "comms_logger.enabled=true")
    assert verify(minimal, launches, *settings, steps=2).exit_code == 0
    for plan in launches.plans[:3]:
        logged, engine = plan.resolved.config.logging, plan.resolved.config.engine
        switches = (logged.profile, logged.memory_profiling, engine.wall_clock_breakdown)
        assert (*switches, engine.flops_profiler.enabled, engine.comms_logger.enabled) == (False,) * 5


def test_the_trainings_start_from_the_checkpoint_in_load(minimal, folder):
    kept = keep("out", 5)
    launches = Launches()
    verify(minimal, launches, "save=out", "save-interval=3", "load=out", steps=2)
    assert [plan.resolved.config.training.exit_interval for plan in launches.plans[:3]] == [9, 7, 9]
    asked = Comparison(**json.loads(launches.plans[3].environment[Comparison.VARIABLE]))
    assert (asked.start, asked.middle, asked.end, asked.rounding) == (5, 7, 9, None)
    first = launches.plans[0].resolved.config.checkpoint.load
    assert first == launches.plans[1].resolved.config.checkpoint.load
    assert first != "out"
    assert sorted(path.name for path in Path("out").iterdir()) == ["global_step5", "latest"]
    assert kept.is_dir()


def test_resume_set_changes_only_the_resumed_training(minimal, folder):
    launches = Launches()
    options = ("zero-stage=1", "num-gpus=2")
    verify(
        minimal, launches, *options, steps=2, resume_set=("zero-stage=0", "model-parallel-size=2", "gas=2")
    )
    stages = [plan.resolved.config.zero.zero_optimization.stage for plan in launches.plans[:3]]
    assert stages == [1, 1, 0]
    assert [plan.resolved.run.layout.tensor for plan in launches.plans[:3]] == [1, 1, 2]
    asked = json.loads(launches.plans[3].environment[Comparison.VARIABLE])
    assert (asked["rounding"], asked["same_sizes"]) == ("fp32", False)


def test_a_difference_exits_with_1_and_is_reported(minimal, folder, capsys):
    assert verify(minimal, Launches(DIFFERS), steps=2).exit_code == 1
    printed = capsys.readouterr().out
    assert shows(printed, "2 steps", "DIFFERENT: 1", "1.0e-03")
    assert printed.endswith(
        "verdict: the runs differ\nfirst difference: loss of iteration 3: 2 instead of 1\nwhy\n"
    )


def test_progress_is_printed_with_an_estimate_after_the_first_training(minimal, folder, capsys):
    verify(minimal, Launches(), steps=2)
    told = capsys.readouterr().err
    assert shows(told, "training 1", "3: 4")
    assert re.search(r"training 1 of 3 ended after \d+ s", told)
    assert shows(told, "training 3", "3: 2", "iteration 2")


@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_training_ends_the_command_with_its_failure(minimal, folder, number):
    launches = Launches(failing=number)
    outcome = verify(minimal, launches, steps=2)
    assert (outcome.exit_code, outcome.first_failure.message) == (7, "it broke")
    assert len(launches.plans) == number


def test_a_failed_resumed_training_is_compared_until_its_failure(minimal, folder, capsys):
    outcome = verify(minimal, Launches(failing=3), steps=2)
    assert outcome.exit_code == 7
    assert "resumed run failed" in capsys.readouterr().out
    launches = Launches(failing=3, restores=False)
    assert verify(minimal, launches, steps=2).exit_code == 7
    assert len(launches.plans) == 3


@pytest.mark.parametrize(("number", "last"), [(1, 4), (2, 2), (3, 4)])
def test_a_training_that_ends_early_without_a_failure_is_not_compared(minimal, folder, number, last):
    """For example after a SIGUSR1 sent only to its workers."""
    launches = Launches(ending_early=number)
    with refused(NeoXError, f"training {number}", "3 ended", f"iteration {last}", code="ended-early"):
        verify(minimal, launches, "save=out", "save-interval=3", steps=2)
    assert len(launches.plans) == number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_between_trainings_leaves_no_folder(minimal, folder, number):
    before = signal.getsignal(number)
    launches = Launches(signalled=number)
    outcome = verify(minimal, launches, "save=out", "save-interval=3", steps=2)
    assert (outcome.exit_code, outcome.was_stopped) == (128 + number, True)
    assert len(launches.plans) == 1
    assert not list(folder.glob(".verify-resume*"))
    assert signal.getsignal(number) is before


def test_an_ignored_sighup_stays_ignored(minimal, folder):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert verify(minimal, Launches(signalled=signal.SIGHUP), steps=2).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


WRONG = {
    "nothing": ({}, (), "Missing option '--steps'"),
    "too many steps": ({"steps": 6}, (), "leaves only 10: give at most --steps 5, or set"),
    "one iteration": ({"steps": 1}, ("train-iters=1",), "leaves only 1: set a larger train-iters (--set"),
    "one iteration left": ({"steps": 1}, ("train-iters=9", "load=out"),
        "leaves only 1 after global_step8: set a larger train-iters (--set"),
    "another batch": ({"steps": 2, "resume_set": ("gas=4",)}, (), "changes train-batch-size from 2 to 8"),
    "dropout": ({"steps": 2, "resume_set": ("num-gpus=2", "model-parallel-size=2")}, ("hidden-dropout=0.1",),
        "add --set hidden-dropout=0 --set attention-dropout=0 to verify"),
    "no states": ({"steps": 2}, ("no-save-optim=true",), "omits the optimizer states from checkpoints"),
    "local disks": ({"steps": 2}, ("checkpoint.use_node_local_storage=true",),
        "leaves no host with a whole checkpoint"),
    "no folder": ({"steps": 2, "work_dir": "nowhere"}, (), "--work-dir nowhere is not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_request_is_refused_before_anything_starts(minimal, folder, case):
    keep("out", 4)
    keep("out", 8)
    wanted, settings, message = WRONG[case]
    overrides = [
        name for name in BASE if name.partition("=")[0] not in {one.partition("=")[0] for one in settings}
    ]
    arguments = [
        word for text in (*overrides, "save=out", "save-interval=4", *settings) for word in ("--set", text)
    ]
    names = {"steps": "--steps", "work_dir": "--work-dir"}
    arguments += [word for name, option in names.items() if name in wanted for word in (option, wanted[name])]
    arguments += [word for text in wanted.get("resume_set", ()) for word in ("--resume-set", text)]
    result = CliRunner().invoke(main, ["verify-resume", "--config", str(minimal), *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert sorted(path.name for path in Path("out").iterdir()) == ["global_step4", "global_step8", "latest"]


def test_a_dry_run_lists_the_trainings_and_starts_nothing(minimal, folder):
    options = [word for text in BASE for word in ("--set", text)]
    arguments = ["verify-resume", "--config", str(minimal), *options, "--steps", "2", "--dry-run"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "1: 4 iterations" in result.output
    assert shows(result.output, "3: 2", "iteration 2")
    live = CliRunner().invoke(main, [*arguments, "--set", "terminal=live"])
    assert live.exit_code == 0, live.output


def test_a_damaged_manifest_is_reported_by_its_path(folder):
    path = keep("out", 4)
    (path / "manifest.json").write_text("{")
    with refused(LaunchError, "out/global_step4/manifest.json", code="damaged-manifest"):
        find_kept("4", ("out",), option="--from")


DAMAGED = {
    "absent": (
        b"global_step9\n",
        ["out/latest", "'global_step9'"],
    ),
    "empty": (b"", ["out/latest", "''"]),
    "binary": (b"\xff\xfe", ["out/latest"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_latest_is_reported_with_a_remedy(folder, case):
    keep("out", 4)
    keep("out", 10)
    content, values = DAMAGED[case]
    Path("out/latest").write_bytes(content)
    with refused(LaunchError, *values) as failure:
        latest_kept("out")
    assert str(failure.value).endswith("run: echo global_step10 > out/latest")


def test_the_old_folder_of_an_interrupted_replacement_is_the_latest_checkpoint(folder):
    keep("out", 4)
    keep("out", 10).rename(Path("out", ".global_step10.replaced"))
    Path("out/latest").write_text("global_step10\n")
    assert latest_kept("out").iteration == 10


def test_the_remedy_for_a_damaged_latest_can_be_pasted_into_a_shell(folder):
    keep("my runs", 4)
    Path("my runs/latest").write_text("global_step9")
    with pytest.raises(LaunchError) as failure:
        latest_kept("my runs")
    subprocess.run(str(failure.value).partition("run: ")[2], shell=True, check=True)
    kept = latest_kept("my runs")
    assert kept is not None
    assert kept.iteration == 4


def test_a_damaged_latest_without_any_checkpoint_is_reported(folder):
    Path("out").mkdir()
    Path("out/latest").write_text("global_step9")
    with refused(LaunchError, code="incomplete-checkpoint"):
        latest_kept("out")


def test_a_skipped_check_shows_its_reason():
    answer = Answer(checks=(Check(name="random streams", compared="", skipped="other sizes"),))
    assert "other sizes" in render_answer(answer)
