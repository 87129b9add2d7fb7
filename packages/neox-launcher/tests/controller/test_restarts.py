"""Which failures are restarted, and from which checkpoint."""

import errno
import signal
import threading
import time
from dataclasses import replace

import pytest

from neox_config import resolve
from neox_launcher.controller import restarts
from neox_launcher.controller.restarts import run_with_restarts
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.protocol.outcome import Failure, Outcome
from neox_launcher.resources.host import Host
from neox_launcher.resources.world import World
from neox_launcher.worker.reporting import LAUNCH_VARIABLE
from support.refusals import shows

FAILURE = Failure(rank=1, host="h", time=0.0, message="the disk is full")
FAILED = Outcome(exit_code=7, first_failure=FAILURE, num_failures=1)
DONE = Outcome(exit_code=0)


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The seconds that each restart would have waited."""
    found = []
    monkeypatch.setattr(restarts, "_wait", found.append)
    return found


@pytest.fixture
def plan(minimal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ("num-gpus=1", "save=saved", "save-interval=2", "load=given", "finetune=true")
    request = Request(program="train", paths=(str(minimal),), overrides=(*overrides, "no-load-rng=true"))
    found = plan_launch(request, gpus=0)
    return replace(found, max_restarts=2)


def attempts(plan, *outcomes, between=lambda number: None):
    """Run a plan whose attempts have these outcomes; return the plans of the attempts and the result.

    The name of the launch, which all attempts share, is left out of the plans.
    """
    seen, launches = [], set()

    def attempt(current):
        environment = dict(current.environment)
        launches.add(environment.pop(LAUNCH_VARIABLE))
        seen.append(replace(current, environment=environment))
        between(len(seen))
        return outcomes[len(seen) - 1]

    outcome = run_with_restarts(plan, attempt)
    assert len(launches) == 1
    return seen, outcome


def again(plan, number):
    """Return the plan of a restart: its workers receive the number of restarts."""
    return replace(plan, environment={**plan.environment, "NEOX_RESTART": str(number)})


def save(folder, name):
    (folder / "saved" / name).mkdir(parents=True)
    (folder / "saved" / name / "manifest.json").touch()


def test_success_needs_no_second_attempt(plan):
    assert attempts(plan, DONE) == ([plan], DONE)


def test_a_failure_without_a_checkpoint_restarts_with_the_same_plan(plan, capsys):
    assert attempts(plan, FAILED, DONE) == ([plan, again(plan, 1)], DONE)
    assert shows(capsys.readouterr().err, "worker 1", "restart 1", "most 2", "2 s")


def test_a_restart_resumes_from_a_checkpoint_saved_meanwhile_with_all_states(plan, tmp_path, capsys):
    save(tmp_path, "global_step2")
    seen, outcome = attempts(
        plan, FAILED, FAILED, DONE, between=lambda number: number == 2 and save(tmp_path, "global_step4")
    )
    assert outcome == DONE
    assert seen[1] == again(plan, 1)
    checkpoint = seen[2].resolved.config.checkpoint
    assert (checkpoint.load, checkpoint.finetune, checkpoint.no_load_rng) == ("saved", False, False)
    assert shows(capsys.readouterr().err, "restart 2", "most 2", "2 s")


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
def test_invalid_requests_and_requests_to_stop_are_not_restarted(plan, outcome):
    assert attempts(plan, outcome) == ([plan], outcome)


def test_a_rollback_is_restarted_as_often_as_the_limit_allows_and_repeated_spikes_are_not(plan):
    rollback = replace(FAILED, exit_code=4, iteration=7, first_failure=replace(FAILURE, exit_code=4))
    repeated = replace(FAILED, exit_code=5, iteration=7)
    seen, outcome = attempts(replace(plan, max_restarts=9), rollback, rollback, rollback, repeated)
    assert (len(seen), outcome) == (4, repeated)
    seen, outcome = attempts(plan, rollback, rollback, rollback)
    assert (len(seen), outcome) == (3, rollback)


def test_waits_double_up_to_five_minutes_and_start_again_after_a_checkpoint(plan, tmp_path, waits):
    lost = replace(FAILED, first_failure=replace(FAILURE, unreported=True))
    attempts(
        replace(plan, max_restarts=11),
        *[lost] * 12,
        between=lambda number: number == 10 and save(tmp_path, "global_step2"),
    )
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 2, 2]


def test_a_checkpoint_of_iteration_0_is_no_progress(plan, tmp_path, waits, capsys):
    lost = replace(FAILED, first_failure=replace(FAILURE, unreported=True))
    attempts(
        replace(plan, max_restarts=3),
        *[lost] * 4,
        between=lambda number: number == 2 and save(tmp_path, "global_step0"),
    )
    assert waits == [2, 4, 8]
    assert "the latest checkpoint" in capsys.readouterr().err


def test_the_same_error_in_the_same_iteration_is_not_retried(plan):
    again = [
        replace(FAILED, iteration=7, first_failure=replace(FAILURE, message=f"loss is nan at 0x{number}f"))
        for number in (1, 2)
    ]
    seen, outcome = attempts(replace(plan, max_restarts=9), *again)
    assert len(seen) == 2
    assert outcome.exit_code == 7
    assert shows(outcome.first_failure, "worker 1", "0x2f", "2 times", "iteration 7")


def test_the_same_error_before_the_first_iteration_is_retried_once_more(plan):
    seen, outcome = attempts(replace(plan, max_restarts=9), FAILED, FAILED, FAILED)
    assert len(seen) == 3
    assert "3 times in" in str(outcome.first_failure)


@pytest.mark.parametrize(
    "second",
    [
        {"iteration": 8},
        {"first_failure": replace(FAILURE, message="another")},
        {"first_failure": replace(FAILURE, unreported=True)},
        {"first_failure": replace(FAILURE, rank=None)},
    ],
)
def test_other_failures_are_retried(plan, second):
    first = replace(FAILED, iteration=7)
    seen, outcome = attempts(replace(plan, max_restarts=9), first, replace(first, **second), first, DONE)
    assert (len(seen), outcome) == (4, DONE)


def test_kills_are_always_retried(plan):
    killed = replace(FAILED, iteration=7, first_failure=replace(FAILURE, unreported=True))
    seen, outcome = attempts(replace(plan, max_restarts=9), *[killed] * 5, DONE)
    assert (len(seen), outcome) == (6, DONE)


def test_a_failure_is_reported_with_checkpoints_that_cannot_be_read(plan, monkeypatch):
    def fail(folder):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    def cut_off(number):
        monkeypatch.setattr(restarts, "written_checkpoints", fail)

    seen, outcome = attempts(plan, FAILED, between=cut_off)
    assert (len(seen), outcome.exit_code) == (1, 7)
    said = str(outcome.first_failure)
    assert said.startswith("worker 1 on h failed:\nthe disk is full\n\nsave: ")
    assert said.endswith("saved cannot be read: Input/output error; make it readable")


def send_twice(thread):
    """Send SIGTERM as `timeout` does, which also signals the process group of its command."""
    for _ in range(2):
        signal.pthread_kill(thread, signal.SIGTERM)
        time.sleep(0.01)


def test_a_signal_ends_the_wait(plan, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setattr(restarts, "checkpoints_of", lambda plan: set())
    monkeypatch.setattr(restarts, "_FIRST_WAIT_SECONDS", 100.0)
    # Pending, if it arrives before the wait.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sender = threading.Timer(0.3, send_twice, (threading.main_thread().ident,))
    sender.start()
    try:
        seen, outcome = attempts(plan, FAILED)
    finally:
        sender.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert (len(seen), outcome) == (1, Outcome(exit_code=143, was_stopped=True))
    assert capsys.readouterr().err.endswith("\nSIGTERM received before the restart: ending\n")


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


def test_an_elastic_job_continues_without_lost_hosts(elastic, tmp_path, capsys):
    seen, outcome = attempts(
        elastic, LOSS, DONE, between=lambda number: save(tmp_path, f"global_step{number}")
    )
    assert outcome == DONE
    assert hosts_of(seen) == [["worker-1", "worker-2", "worker-3"], ["worker-2", "worker-3"]]
    assert [plan.resolved.run.batch.accumulation for plan in seen] == [2, 3]
    assert seen[1].resolved.config.checkpoint.load == "saved"
    assert shows(capsys.readouterr().err, "worker 1", "restart 1", "most 3", "2 s", "worker-1")


def test_unused_slots_are_used_when_more_hosts_are_lost(elastic, tmp_path, capsys):
    hosts = tuple(Host(f"worker-{number}", tuple(range(number))) for number in (1, 2, 3))
    resolved = resolve(elastic.resolved.config, devices=6, hosts=3)
    whole = replace(elastic, world=World(hosts=hosts, gpus=None), resolved=resolved)
    second = replace(LOSS, lost_hosts=("worker-2",))
    seen, _ = attempts(whole, LOSS, second, DONE)
    # Five slots are left: two workers on worker-2 and one of the three on worker-3; then all three there.
    assert [[len(host.slots) for host in plan.world.hosts] for plan in seen] == [[1, 2, 3], [2, 1], [3]]
    assert shows(capsys.readouterr().err, "worker-2", "3 workers", "3")


def test_a_failure_without_a_lost_host_restarts_on_the_same_hosts(elastic):
    seen, _ = attempts(elastic, replace(FAILED, has_started=True), DONE)
    assert hosts_of(seen) == [["worker-1", "worker-2", "worker-3"]] * 2


def test_a_host_that_fails_at_the_first_start_is_tried_once_more(elastic):
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
    assert shows(said, "12 samples", "2, 3")


def test_a_job_without_elasticity_restarts_on_the_same_hosts(elastic):
    rigid = replace(elastic, program="evaluate")
    seen, _ = attempts(rigid, LOSS, DONE)
    assert hosts_of(seen) == [["worker-1", "worker-2", "worker-3"]] * 2
