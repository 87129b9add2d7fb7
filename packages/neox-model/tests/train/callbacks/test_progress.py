"""A worker reports its progress, and the collective that it waits for, to its agent."""

import json
import logging
import time
from types import SimpleNamespace

import pytest
import torch

from neox_launcher.worker.reporting import ALL_DONE, Progress
from neox_model.metrics.throughput import Throughput
from neox_model.parallel.flight_recorder import newest_per_group
from neox_model.train.callbacks.checkpoint import CheckpointCallback
from neox_model.train.callbacks.progress import (
    ProgressCallback,
    reported_progress,
    while_saving,
)
from neox_model.train.state import StepReport, TrainState
from support.distributed import run_ranks
from support.runs import a_run


def test_progress_is_the_iteration_and_ends_with_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    callback = ProgressCallback()
    run = a_run(callback, progress=Progress(3))
    run.state.iteration = 7
    callback.on_step(None)
    assert int((tmp_path / "rank-3.progress").read_text()) == 7
    callback.on_end()
    assert int((tmp_path / "rank-3.progress").read_text()) == ALL_DONE


class Curve:
    """A schedule whose rate is the number of the update."""

    current_rate = 1.0


def read_status(folder):
    return json.loads((folder / "rank-0.status").read_text())


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """A callback of rank 0, and a function that finishes an iteration at a time with a loss."""
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    schedule, clock = Curve(), SimpleNamespace(now=0.0)
    callback = ProgressCallback(clock=lambda: clock.now)
    state = TrainState(last_iteration=9, samples_per_iteration=8, iteration=2)
    throughput = Throughput(flops_per_token=1e9, causal_flops_per_token=9e8, num_devices=2)
    run = a_run(callback, state=state, schedule=schedule, throughput=throughput)
    callback.on_start()

    def step(now, loss, loss_scale=None):
        clock.now = now
        report = StepReport(
            loss=torch.tensor(loss), grad_norm=None, skipped=False, tokens=100, loss_scale=loss_scale
        )
        state.advance(report)
        schedule.current_rate += 1.0
        callback.on_step(report)
        return read_status(tmp_path)

    return SimpleNamespace(step=step, end=callback.on_end, state=state, progress=run.progress)


def test_the_status_is_reported_once_a_second_with_the_rate_of_the_finished_update(reports, tmp_path):
    assert read_status(tmp_path)["phase"] == "first iteration"
    first = reports.step(10.0, 3.5, loss_scale=4.0)
    assert first == {
        "phase": "",
        "iteration": 3,
        "last_iteration": 9,
        "metrics": {"loss/train": 3.5, "optimizer/loss_scale": 4.0, "optimizer/learning_rate": 1.0},
    }
    assert reports.step(10.5, 3.0) == first
    later = reports.step(11.25, 2.5)
    assert (later["iteration"], later["metrics"]["loss/train"]) == (5, 2.5)
    assert later["metrics"]["optimizer/learning_rate"] == 3.0


def test_rates_leave_the_time_in_phases_out(reports, tmp_path):
    reports.step(10.0, 3.0)
    reports.progress.seconds_in_phases += 20.0
    assert "throughput/tokens_per_second" not in reports.step(34.0, 3.0)["metrics"]
    metrics = reports.step(38.0, 3.0)["metrics"]
    assert metrics["throughput/tokens_per_second"] == 200 / 8.0
    assert metrics["throughput/tflops_per_device"] == pytest.approx(200 / 8.0 * 1e9 / 2 / 1e12)


def test_the_last_iteration_is_reported_however_soon_it_follows(reports, tmp_path):
    reports.step(10.0, 3.0)
    reports.step(10.1, 2.0)
    reports.end()
    found = read_status(tmp_path)
    assert (found["phase"], found["iteration"], found["metrics"]["loss/train"]) == ("finishing", 4, 2.0)


def test_the_iteration_that_ends_the_training_is_reported_at_once(reports, tmp_path):
    reports.state.last_iteration = 4
    reports.step(10.0, 3.0)
    assert reports.step(10.1, 2.0)["iteration"] == 4


class Arrival:
    """An event of a device that is behind: numbers arrive when a test says so, or when awaited."""

    def __init__(self):
        self.has_passed = False

    def query(self):
        return self.has_passed

    def synchronize(self):
        self.has_passed = True


@pytest.fixture
def arrivals(monkeypatch):
    """The arrivals of the copies of all iterations, in order."""
    found = []

    def start_copy(numbers):
        found.append(Arrival())
        return dict(numbers), found[-1]

    monkeypatch.setattr("neox_model.train.callbacks.progress._start_copy", start_copy)
    return found


def test_numbers_that_arrive_late_are_reported_with_their_iteration(reports, arrivals, tmp_path):
    assert reports.step(10.0, 3.0)["metrics"] == {}
    arrivals[0].has_passed = True
    found = reports.step(10.2, 2.5)
    assert (found["phase"], found["iteration"], found["metrics"]["loss/train"]) == ("", 3, 3.0)
    arrivals[1].has_passed = True
    found = reports.step(11.5, 2.0)
    assert (found["iteration"], found["metrics"]["optimizer/learning_rate"]) == (4, 2.0)


def test_the_last_loss_is_that_of_the_last_iteration_however_late_it_arrives(reports, arrivals, tmp_path):
    for number in range(6):
        reports.step(10.0 + number / 10, 6.0 - number)
    reports.end()
    found = read_status(tmp_path)
    assert (found["iteration"], found["metrics"]["loss/train"]) == (8, 1.0)


def test_a_device_that_is_behind_is_asked_again_in_every_iteration(reports, arrivals):
    for number in range(5):
        assert reports.step(10.0 + number, 5.0 - number)["phase"] == "first iteration"
    arrivals[1].has_passed = arrivals[0].has_passed = True
    found = reports.step(15.0, 0.0)
    assert (found["iteration"], found["metrics"]["loss/train"]) == (4, 4.0)


def test_a_loss_that_is_not_finite_is_reported(reports):
    found = reports.step(10.0, float("nan"))
    assert found["metrics"]["loss/train"] is None
    assert found["nonfinite"] == {"metrics": {"loss/train": "nan"}}


def test_metrics_and_warnings_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    handlers = list(logging.getLogger().handlers)
    with reported_progress(0) as progress:
        progress.describe(metrics={"loss/validation": 2.0})
        logging.getLogger("test").info("fine")
        logging.getLogger("test").warning("careful")
        logging.getLogger("test").error("wrong")
        assert read_status(tmp_path) == {"metrics": {"loss/validation": 2.0}, "warnings": 2}
        with while_saving(progress, 7):
            found = read_status(tmp_path)
            assert (found["phase"], found["iteration"]) == ("saving iteration 7", 7)
        assert int((tmp_path / "rank-0.progress").read_text()) == 7
    assert logging.getLogger().handlers == handlers


def test_progress_is_reported_during_a_save(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("neox_launcher.worker.reporting._BEAT_SECONDS", 0.001)
    told, saved = tmp_path / "rank-0.progress", []

    def save(run, folder):
        saved.append(told.stat().st_mtime_ns)
        deadline = time.monotonic() + 300
        while told.stat().st_mtime_ns == saved[0]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert int(told.read_text()) == run.state.iteration

    callback = CheckpointCallback(tmp_path, interval=2, save=save)
    state = TrainState(last_iteration=9, samples_per_iteration=8, iteration=4)
    a_run(callback, state=state)
    callback.on_step(None)
    assert len(saved) == 1


def test_nothing_is_reported_without_an_agent(monkeypatch):
    monkeypatch.delenv("NEOX_RUN_DIR", raising=False)
    a_run(callback := ProgressCallback())
    callback.on_end()


def test_the_newest_collective_of_each_group_counts():
    def entry(group, number, name, is_p2p=False):
        return {
            "process_group": group,
            "collective_seq_id": number,
            "profiling_name": name,
            "is_p2p": is_p2p,
        }

    world, pair = ["0", "default_pg"], ["1", "pair"]
    entries = [entry(world, 2, "b"), entry(world, 1, "a"), entry(pair, 9, "c"), entry(pair, 99, "send", True)]
    assert newest_per_group(entries) == {"0:default_pg": (2, "b"), "1:pair": (9, "c")}


def count_collectives() -> str:
    import torch
    from torch import distributed

    from neox_model.parallel.flight_recorder import last_collectives

    for _ in range(5):
        distributed.all_reduce(torch.ones(1))
    return last_collectives()


@pytest.mark.slow
def test_the_flight_recorder_of_a_real_process_is_read():
    [answer] = run_ranks(count_collectives, size=1, environment={"TORCH_FR_BUFFER_SIZE": "100"})
    assert json.loads(answer)["0:default_pg"] == [5, "gloo:all_reduce"]
