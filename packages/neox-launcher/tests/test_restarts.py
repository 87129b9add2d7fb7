"""When a launch begins again, and from where."""

from dataclasses import replace

import pytest

from neox_launcher.launch import Request, plan_launch
from neox_launcher.outcome import Failure, Outcome
from neox_launcher.restarts import run_with_restarts

FAILURE = Failure(rank=1, host="h", time=0.0, message="the disk is full")
FAILED = Outcome(exit_code=7, first_failure=FAILURE, num_failures=1)
DONE = Outcome(exit_code=0)


@pytest.fixture
def plan(minimal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ("num-gpus=1", "save=saved", "save-interval=2", "load=given", "finetune=true")
    request = Request(program="train", paths=(str(minimal),), overrides=(*overrides, "no-load-rng=true"))
    found = plan_launch(request, gpus=0)
    return replace(found, max_restarts=2)


def attempts(plan, *outcomes, between=lambda number: None):
    """Carry out a plan with these outcomes; the plans of the attempts, and what it came to."""
    seen = []

    def attempt(current):
        seen.append(current)
        between(len(seen))
        return outcomes[len(seen) - 1]

    return seen, run_with_restarts(plan, attempt)


def save(folder, name):
    (folder / "saved" / name).mkdir(parents=True)
    (folder / "saved" / name / "manifest.json").touch()


def test_success_needs_no_second_attempt(plan):
    assert attempts(plan, DONE) == ([plan], DONE)


def test_a_failure_without_a_checkpoint_begins_again_as_before(plan, capsys):
    assert attempts(plan, FAILED, DONE) == ([plan, plan], DONE)
    assert capsys.readouterr().err == (
        "\nworker 1 on h failed:\nthe disk is full\n\n"
        "restart 1 of at most 2, from the newest checkpoint in given\n"
    )


def test_what_was_saved_meanwhile_is_gone_on_from_with_all_that_is_in_it(plan, tmp_path, capsys):
    save(tmp_path, "global_step2")
    seen, outcome = attempts(
        plan, FAILED, FAILED, DONE, between=lambda number: number == 2 and save(tmp_path, "global_step4")
    )
    assert outcome == DONE
    assert seen[1] == plan
    checkpoint = seen[2].resolved.config.checkpoint
    assert (checkpoint.load, checkpoint.finetune, checkpoint.no_load_rng) == ("saved", False, False)
    assert "restart 2 of at most 2, from the newest checkpoint in saved" in capsys.readouterr().err


def test_the_last_failure_is_the_result(plan):
    seen, outcome = attempts(plan, FAILED, FAILED, FAILED)
    assert (len(seen), outcome) == (3, FAILED)


@pytest.mark.parametrize(
    "outcome",
    [
        replace(FAILED, exit_code=2),
        replace(FAILED, was_stopped=True),
        Outcome(exit_code=143, was_stopped=True),
    ],
)
def test_wrong_requests_and_requests_to_stop_are_not_tried_again(plan, outcome):
    assert attempts(plan, outcome) == ([plan], outcome)
