import re

import pytest
import torch

from neox_config.facts.learning_rate import WarmupThenDecay
from neox_model.metrics.throughput import Throughput
from neox_model.metrics.timers import Timers
from neox_model.metrics.writers.jsonl import JsonlWriter, read_metrics
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.train.callbacks.checkpoint import CheckpointCallback
from neox_model.train.callbacks.log import LogCallback
from neox_model.train.callbacks.stop import StopCallback
from neox_model.train.loop import Loop
from neox_model.train.run import Callback
from neox_model.train.state import StepReport, TrainState
from support.runs import SAMPLES, AfterStep, CountingStep, Record, a_run, count


class Engine(Callback):
    """Steps the schedule as the engine does: before any other callback, when the update was applied."""

    def on_step(self, report):
        if not report.skipped:
            self.run.schedule.step()


def parts():
    """Return the parts of a run that the log reads."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    curve = WarmupThenDecay(style="linear", peak=1.0, floor=0.0, warmup=0.0, decay_iterations=10)
    return {
        "schedule": LearningRateSchedule(optimizer, curve),
        "throughput": Throughput(flops_per_token=1.0, causal_flops_per_token=1.0, num_devices=1),
    }


def logged(*others, interval=2, first=(), clock=None, **settings):
    """Train with a log, after `first` and before `others`, and return what is written."""
    record = Record()
    log = LogCallback(interval, **({} if clock is None else {"clock": clock}))
    count(Engine(), *first, log, *others, **{"writers": [record]} | parts() | settings)
    return record.metrics


def test_every_iteration_is_written_with_the_rate_its_update_used():
    lines = logged(last=5)
    shown = [(number, m["loss/train"], m["optimizer/learning_rate"]) for number, m in lines]
    # The third update is skipped, so the fourth uses the same rate.
    assert shown == [(1, 10.0, 1.0), (2, 9.0, 0.9), (3, 8.0, 0.8), (4, 7.0, 0.8), (5, 6.0, 0.7)]
    assert {m["optimizer/grad_norm"] for _, m in lines} == {0.5}


def test_speed_is_written_once_per_interval_and_interval_ends_are_read_one_iteration_late():
    record, written = Record(), []
    logged(AfterStep(lambda run: written.append(len(record.metrics))), writers=[record], last=5)
    assert written == [0, 0, 2, 2, 4]
    assert [number for number, m in record.metrics if "throughput/tokens_per_second" in m] == [2, 4, 5]


def test_the_time_left_counts_evaluations_and_leaves_pauses_out():
    record, now = Record(), [0.0]

    def advance(run):
        """An iteration takes 1 s, and the evaluation after each second one 6 s."""
        now[0] += 1.0 + 6.0 * (run.state.iteration % 2 == 0)

    log = LogCallback(4, clock=lambda: now[0])
    state = TrainState(last_iteration=40, samples_per_iteration=SAMPLES)
    run = a_run(Engine(), log, AfterStep(advance), state=state, writers=[record], **parts())
    Loop(run, iter(range(100))).run()
    left = {number: m["time/left"] for number, m in record.metrics if "time/left" in m}
    # Of the first iteration only the end counts.
    assert left[4] == pytest.approx((1 + 7 + 1) / 3 * 36, rel=0.01)
    assert left[24] == pytest.approx(4.0 * 16, rel=0.05)
    state.last_iteration = 100
    now[0] += 10_000.0
    log.on_resume()
    report = StepReport(loss=torch.tensor(0.0), grad_norm=None, skipped=False, tokens=8)
    for state.iteration in (41, 42, 43, 44):
        log.on_step(report)
        now[0] += 4.0
    run.metrics.write_pending()
    assert record.metrics[-1][1]["time/left"] == pytest.approx(4.0 * 56, rel=0.1)


def test_the_first_iteration_is_logged_if_its_metrics_come_later(caplog):
    caplog.set_level("INFO")
    logged(interval=10, last=25, iteration=12)
    (line,) = caplog.messages
    assert re.fullmatch(
        r"iteration 13/25 after 0\.\d s; the next line of metrics follows iteration 20",
        line,
    )
    caplog.clear()
    logged(interval=10, last=12, iteration=9)
    assert caplog.messages == []


def test_a_long_interval_is_not_silent(caplog):
    caplog.set_level("INFO")
    now = [0.0]

    def advance(run):
        """Ten seconds pass in each iteration."""
        now[0] = 10.0 * (run.state.iteration - 1)

    logged(first=[AfterStep(advance)], interval=12, clock=lambda: now[0], last=15)
    follows = "the next line of metrics follows iteration 12"
    assert [line for line in caplog.messages if line.endswith(follows)] == [
        f"iteration 1/15 after 0.0 s; {follows}",
        f"iteration 4/15 after 30.0 s; {follows}",
        f"iteration 7/15 after 30.0 s; {follows}",
        f"iteration 10/15 after 30.0 s; {follows}",
    ]


def test_phases_before_a_pause_do_not_count_in_the_interval_after_it():
    clock = iter(range(1000))
    record, phases = Record(), Timers(clock=lambda: float(next(clock)))

    class Step(CountingStep):
        def __call__(self, batches):
            # One second by this clock.
            with phases.measure("forward"):
                return super().__call__(batches)

    run = a_run(
        *(Engine(), LogCallback(10, phases=phases)),
        state=TrainState(last_iteration=4, samples_per_iteration=SAMPLES),
        step=Step(),
        writers=[record],
        **parts(),
    )
    loop = Loop(run, iter(range(100)))
    loop.run(3)
    loop.run()
    assert record.metrics[-1][1]["time/forward"] == 1.0


def test_pending_metrics_are_written_before_a_checkpoint(tmp_path):
    record, seen = Record(), []
    save = CheckpointCallback(tmp_path, interval=2, save=lambda run, folder: seen.append(len(record.metrics)))
    logged(save, interval=100, writers=[record])
    assert seen == [2, 4]


def test_without_writers_nothing_is_kept():
    run = a_run(Engine(), LogCallback(2), **parts())
    Loop(run, iter(range(100))).run()
    assert run.metrics._pending == []


def test_the_record_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path):
    def train_part(folder, iteration, *others):
        writer = JsonlWriter(folder, iteration=iteration)
        # Without the engine, which would step a schedule that starts anew.
        run = {"writers": [writer], "last": 6, "iteration": iteration} | parts()
        count(*others, LogCallback(1), **run)
        writer.close()
        return [record["loss/train"] for record in read_metrics(folder / "metrics.jsonl")]

    whole = train_part(tmp_path / "whole", 0)
    train_part(tmp_path / "parts", 0, StopCallback(SINGLE_RANK, exit_interval=3))
    assert train_part(tmp_path / "parts", 3) == whole
