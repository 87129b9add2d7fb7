"""When a launch begins again, and from where."""

from dataclasses import replace

import pytest

from neox_launcher.config import resolve
from neox_launcher.launch import Request, plan_launch
from neox_launcher.outcome import Failure, Outcome
from neox_launcher.resources.host import Host
from neox_launcher.resources.world import World
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


def again(plan, number):
    """The plan of a restart: its workers are told how many there were."""
    return replace(plan, environment={**plan.environment, "NEOX_RESTART": str(number)})


def save(folder, name):
    (folder / "saved" / name).mkdir(parents=True)
    (folder / "saved" / name / "manifest.json").touch()


def test_success_needs_no_second_attempt(plan):
    assert attempts(plan, DONE) == ([plan], DONE)


def test_a_failure_without_a_checkpoint_begins_again_as_before(plan, capsys):
    assert attempts(plan, FAILED, DONE) == ([plan, again(plan, 1)], DONE)
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
    assert seen[1] == again(plan, 1)
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


LOSS = replace(FAILED, has_started=True, lost_hosts=("worker-1",))


@pytest.fixture
def elastic(minimal, tmp_path, monkeypatch):
    """Three hosts; 12 samples are shared by 1, 2, 3 or 6 workers, by no fewer than two here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("".join(f"worker-{number} slots=1\n" for number in (1, 2, 3)))
    sizes = "max_train_batch_size: 12, micro_batch_sizes: [2], min_gpus: 2, version: 0.1"
    more = tmp_path / "elastic.yml"
    more.write_text(f"elasticity: {{enabled: true, {sizes}}}\nhostfile: hosts\nlauncher: ssh\nsave: saved\n")
    given = ("train-micro-batch-size-per-gpu=null", "save-interval=2")
    request = Request(program="train", paths=(str(minimal), str(more)), overrides=given)
    return replace(plan_launch(request, gpus=0, environment={}), max_restarts=3)


def hosts_of(plans):
    return [[host.name for host in plan.world.hosts] for plan in plans]


def test_an_elastic_job_goes_on_without_the_hosts_that_it_has_lost(elastic, tmp_path, capsys):
    seen, outcome = attempts(
        elastic, LOSS, DONE, between=lambda number: save(tmp_path, f"global_step{number}")
    )
    assert outcome == DONE
    assert hosts_of(seen) == [["worker-1", "worker-2", "worker-3"], ["worker-2", "worker-3"]]
    assert [plan.resolved.derived.accumulation for plan in seen] == [2, 3]
    assert seen[1].resolved.config.checkpoint.load == "saved"
    assert capsys.readouterr().err == (
        "\nworker 1 on h failed:\nthe disk is full\n\n"
        "restart 1 of at most 3, from the newest checkpoint in saved\n"
        "lost: worker-1; going on with 2 workers (before: 3) on worker-2, worker-3\n"
        "train batch 12 as before: micro-batch 2, gradient accumulation steps 3, data-parallel size 2\n"
    )


def test_slots_that_were_not_used_are_used_when_more_hosts_are_lost(elastic, tmp_path, capsys):
    hosts = tuple(Host(f"worker-{number}", tuple(range(number))) for number in (1, 2, 3))
    resolved = resolve(elastic.resolved.config, devices=6, hosts=3)
    whole = replace(elastic, world=World(hosts=hosts, gpus=None), resolved=resolved)
    second = replace(LOSS, lost_hosts=("worker-2",))
    seen, _ = attempts(whole, LOSS, second, DONE)
    # Five slots are left: two workers on worker-2 and one of the three on worker-3; then all three there.
    assert [[len(host.slots) for host in plan.world.hosts] for plan in seen] == [[1, 2, 3], [2, 1], [3]]
    assert "lost: worker-2; going on with 3 workers (before: 3) on worker-3\n" in capsys.readouterr().err


def test_what_is_no_loss_of_a_host_starts_on_the_same_hosts(elastic):
    seen, _ = attempts(elastic, replace(FAILED, has_started=True), DONE)
    assert hosts_of(seen) == [["worker-1", "worker-2", "worker-3"]] * 2


def test_a_host_that_does_not_come_is_tried_once_more_before_the_job_goes_on_without_it(elastic):
    absent = replace(LOSS, has_started=False)
    seen, _ = attempts(elastic, absent, absent, DONE)
    assert hosts_of(seen) == [*[["worker-1", "worker-2", "worker-3"]] * 2, ["worker-2", "worker-3"]]


def test_too_few_hosts_end_an_elastic_job_with_both_reasons(elastic):
    seen, outcome = attempts(elastic, replace(LOSS, lost_hosts=("worker-1", "worker-2")))
    assert len(seen) == 1
    assert outcome.exit_code == 7
    said = str(outcome.first_failure)
    assert said.startswith(
        "worker 1 on h failed:\nthe disk is full\n\nlost: worker-1, worker-2; the job cannot"
    )
    assert "its batch of 12 samples suits 2, 3 workers" in said


def test_any_other_job_is_started_on_the_same_hosts_again(elastic):
    rigid = replace(elastic, program="evaluate")
    seen, _ = attempts(rigid, LOSS, DONE)
    assert hosts_of(seen) == [["worker-1", "worker-2", "worker-3"]] * 2
