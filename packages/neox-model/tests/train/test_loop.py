import errno
import gc
import json
import logging
import math
import os
import re
import signal
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from neox_config.errors import NeoXError
from neox_config.facts.learning_rate import WarmupThenDecay
from neox_model.checkpoint.errors import CheckpointError
from neox_model.metrics.progress_lines import ProgressLines
from neox_model.metrics.throughput import Throughput
from neox_model.metrics.timers import Phases, Timers
from neox_model.metrics.writers.jsonl import JsonlWriter, read_metrics
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.train import evaluate
from neox_model.train.data.position import Position
from neox_model.train.evaluate import Evaluation, Evaluator
from neox_model.train.run import Callback
from neox_model.train.callbacks.evaluate import EvaluateCallback, ReserveCallback
from neox_model.train.callbacks.log import LogCallback
from neox_model.train.callbacks.stop import StopCallback
from neox_model.train.callbacks.upkeep import GarbageCollection
from neox_model.train.loop import Loop
from neox_model.train.saving import Background, CheckpointCallback, SaveClock, UploadCallback
from neox_model.train.state import StepReport, TrainState

# Of an iteration: two micro-batches of two.
SAMPLES = 4


class CountingStep:
    """Loss = 10 - the batch's number; every third update overflows."""

    def __call__(self, batches):
        number = next(batches)
        return StepReport(
            loss=torch.tensor(10.0 - number), grad_norm=torch.tensor(0.5), skipped=number % 3 == 2, tokens=8
        )

    def evaluate(self, batches, num_micro_batches, is_stopping):
        found = []
        while len(found) < num_micro_batches:
            found.append(float(next(batches)))
            if is_stopping():
                break
        return torch.tensor(found).mean()


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def on_start(self, state):
        self.calls.append(("start", state.iteration))

    def on_step(self, state, report):
        self.calls.append(("step", state.iteration))

    def on_end(self, state):
        self.calls.append(("end", state.iteration))


def run(*hooks, last=4, iteration=0, evaluated=0, due=None):
    state = TrainState(last_iteration=last, samples_per_iteration=SAMPLES, iteration=iteration)
    # As a checkpoint of this iteration holds it, for hooks that evaluate every second iteration.
    state.samples, state.validation_samples, state.due_validation = SAMPLES * iteration, evaluated, due
    Loop(state, CountingStep(), iter(range(iteration, 100)), hooks).run()
    return state


def test_hooks_are_called_around_every_iteration():
    recorder = Recorder()
    run(recorder, last=2)
    assert recorder.calls == [("start", 0), ("step", 1), ("step", 2), ("end", 2)]


def test_a_finished_training_only_starts_and_ends():
    recorder = Recorder()
    run(recorder, last=2, iteration=2)
    assert recorder.calls == [("start", 2), ("end", 2)]


def test_state_counts_iterations_tokens_and_skipped_updates_and_survives_a_restart():
    state = run(last=6)
    again = TrainState(last_iteration=6, samples_per_iteration=5)
    again.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert (again.iteration, again.tokens, again.skipped_iterations) == (6, 48, 2)
    sizes = ((0, SAMPLES),)
    assert again.position == Position(iteration=6, samples=6 * SAMPLES, batch_sizes=sizes) == state.position


def test_state_records_the_batch_sizes_of_all_iterations():
    saved = None
    for size, last in ((4, 2), (6, 5), (5, 9), (5, 10), (8, 12)):
        state = TrainState(last_iteration=last, samples_per_iteration=size)
        if saved is not None:
            state.load_state_dict(saved)
        Loop(state, CountingStep(), iter(range(100)), []).run()
        saved = json.loads(json.dumps(state.state_dict()))
    sizes = ((0, 4), (2, 6), (5, 5), (10, 8))
    expected = Position(iteration=12, samples=2 * 4 + 3 * 6 + 5 * 5 + 2 * 8, batch_sizes=sizes)
    assert Position.from_state(saved) == state.position == expected


# Stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_training_after_the_next_iteration(number):
    class Signaller(Callback):
        def on_step(self, state, report):
            if state.iteration == 2:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    state = run(Signaller(), StopCallback(SINGLE_RANK, exit_interval=None), last=50)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert (state.iteration, state.stop_reason) == (3, f"{name} received")
    assert signal.getsignal(number) is before


def test_a_second_signal_meets_the_previous_handler():
    class TwoSignals(Callback):
        def on_step(self, state, report):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    stop = StopCallback(SINGLE_RANK, exit_interval=None)
    with pytest.raises(KeyboardInterrupt):
        run(TwoSignals(), stop)


def test_repeated_stop_request_is_one_request():
    class Scheduler(Callback):
        def on_step(self, state, report):
            if state.iteration == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

    state = run(Scheduler(), StopCallback(SINGLE_RANK, exit_interval=None), last=50)
    assert (state.iteration, state.stop_reason) == (3, "SIGTERM received")


@pytest.fixture
def _warning_blocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    yield
    # Ignored for a moment, so that a pending one is discarded.
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    signal.signal(signal.SIGUSR1, handler)


@pytest.mark.usefixtures("_warning_blocked")
def test_a_repeated_sigusr1_is_one_request_and_a_sigterm_after_it_ends_nothing_at_once(caplog):
    class Scheduler(Callback):
        def on_step(self, state, report):
            for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)

    caplog.set_level(logging.INFO)
    state = run(Scheduler(), StopCallback(SINGLE_RANK, exit_interval=None, save="kept"), last=50)
    assert (state.iteration, state.stop_reason) == (2, "SIGUSR1 received")
    assert caplog.messages == ["stopping after iteration 2: SIGUSR1 received; saving a checkpoint in kept"]


@pytest.mark.usefixtures("_warning_blocked")
def test_a_sigusr1_sent_while_loading_ends_the_training_before_its_first_iteration(caplog):
    caplog.set_level(logging.INFO)
    # To this thread: any other that does not block it would end the process.
    signal.raise_signal(signal.SIGUSR1)
    state = run(StopCallback(SINGLE_RANK, exit_interval=None), last=50, iteration=7)
    assert (state.iteration, state.stop_reason) == (7, "SIGUSR1 received")
    [line] = caplog.messages
    assert line == "stopping before iteration 8: SIGUSR1 received; nothing new to save"


@pytest.mark.usefixtures("_warning_blocked")
def test_a_sigusr1_after_the_training_stays_pending():
    run(StopCallback(SINGLE_RANK, exit_interval=None), last=2)
    signal.raise_signal(signal.SIGUSR1)
    assert signal.SIGUSR1 in signal.sigpending()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_signal_during_the_last_upload_does_not_end_it(is_stopped):
    class Uploading:
        poll_count = 0
        ended = False

        def poll(self):
            self.poll_count += 1
            if is_stopped and self.poll_count == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def finish(self):
            os.kill(os.getpid(), signal.SIGTERM)
            self.ended = True

    before = signal.getsignal(signal.SIGTERM)
    uploads = Uploading()
    hook = UploadCallback(uploads, resumed=None, while_waiting=nullcontext)
    run(StopCallback(SINGLE_RANK, exit_interval=None), hook, last=50 if is_stopped else 3)
    assert uploads.ended
    assert signal.getsignal(signal.SIGTERM) is before


def test_stop_names_the_signal_that_the_launcher_received(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    (tmp_path / "stop-signal").write_text(str(int(signal.SIGHUP)))

    class Launcher(Callback):
        def on_step(self, state, report):
            os.kill(os.getpid(), signal.SIGTERM)

    caplog.set_level(logging.INFO)
    state = run(Launcher(), StopCallback(SINGLE_RANK, exit_interval=None), last=50)
    assert state.stop_reason == "SIGHUP received"
    assert caplog.messages[0].endswith("SIGHUP received; no checkpoint is saved, because `save` is not set")


def test_exit_interval_counts_iterations_of_the_whole_training():
    state = run(StopCallback(SINGLE_RANK, exit_interval=5), last=50, iteration=7)
    assert state.iteration == 10


def test_a_training_that_is_complete_is_not_stopped():
    state = run(StopCallback(SINGLE_RANK, exit_interval=5), last=10)
    assert (state.iteration, state.stop_reason) == (5, "exit_interval is 5")
    state = run(StopCallback(SINGLE_RANK, exit_interval=5), last=10, iteration=5)
    assert (state.iteration, state.stop_reason) == (10, None)


# Saving


def run_saving(save, *, last=7, interval=3, hooks=()):
    hook = CheckpointCallback(save, interval=interval, timers=Timers(), before_save=lambda: None)
    return run(*hooks, hook, last=last)


def test_saves_at_the_interval_and_at_the_end():
    saved = []
    run_saving(lambda state: saved.append(state.iteration))
    assert saved == [3, 6, 7]


@pytest.mark.parametrize(
    ("growth", "saved"),
    [(2, [1, 2, 4, 8, 16, 20]), (1.5, [1, 2, 3, 5, 7, 11, 17, 20]), (100.0, [1, 20])],
)
def test_saves_at_powers_rounded_down_as_gpt_neox_does(growth, saved):
    found = []
    hook = CheckpointCallback(
        lambda state: found.append(state.iteration),
        interval=None,
        growth=growth,
        timers=Timers(),
        before_save=lambda: None,
    )
    run(hook, last=20)
    assert found == saved


def test_the_last_iteration_is_saved_once():
    saved = []
    run_saving(lambda state: saved.append(state.iteration), last=6)
    assert saved == [3, 6]


def test_a_stopped_training_saves_where_it_stopped():
    saved = []
    run_saving(lambda state: saved.append(state.iteration), hooks=[StopCallback(SINGLE_RANK, exit_interval=4)])
    assert saved == [3, 4]


def save_extra(*, extra=(), clock=None, last=9, iteration=0, watched=None, failing=()):
    """Train with saves at 4 and 8, and return the saved iterations."""
    saved = []

    def save(state):
        saved.append(state.iteration)
        if state.iteration in failing:
            raise CheckpointError("the disk is full")

    def watch(iteration):
        watched.append(iteration)
        return nullcontext()

    hook = CheckpointCallback(
        save,
        interval=4,
        extra=extra,
        clock=clock,
        timers=Timers(),
        before_save=lambda: None,
        while_saving=nullcontext if watched is None else watch,
    )
    run(hook, last=last, iteration=iteration)
    return saved


def test_extra_iterations_are_saved_once_and_in_any_order():
    assert save_extra(extra=(7, 4, 1)) == [1, 4, 7, 8, 9]
    assert save_extra(extra=(9, 10)) == [4, 8, 9]


def test_iteration_0_is_saved_before_the_first_one_without_reporting_it_as_progress():
    watched = []
    assert save_extra(extra=(0, 2), watched=watched) == [0, 2, 4, 8, 9]
    assert watched == [2, 4, 8, 9]
    assert save_extra(extra=(0, 2), iteration=5) == [8, 9]
    assert save_extra(extra=(0,), iteration=9) == []


class Ticks:
    """A clock that each reading advances by half a minute."""

    def __init__(self):
        self.readings = 0

    def __call__(self):
        self.readings += 1
        return 30.0 * self.readings


@pytest.mark.parametrize(
    ("minutes", "saved"), [(0.5, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (1, [2, 4, 6, 8, 9]), (100, [4, 8, 9])]
)
def test_a_save_is_due_that_many_minutes_after_the_last_one(minutes, saved):
    """One reading starts the clock anew, and one follows each iteration."""
    assert save_extra(clock=SaveClock(SINGLE_RANK, minutes=minutes, now=Ticks())) == saved


def test_a_save_at_the_interval_restarts_the_clock():
    """Due after 3 readings: at 3; then the interval saves at 4, so that the next one is due at 7."""
    assert save_extra(clock=SaveClock(SINGLE_RANK, minutes=1.5, now=Ticks())) == [3, 4, 7, 8, 9]


def test_a_save_by_time_that_fails_is_tried_again_after_the_same_time(caplog):
    clock = SaveClock(SINGLE_RANK, minutes=1, now=Ticks())
    assert save_extra(clock=clock, failing={2}) == [2, 4, 6, 8, 9]
    assert caplog.messages == ["iteration 2 was not saved, training continues: the disk is full"]


def full_disk(failing):
    def save(state):
        if state.iteration in failing:
            raise CheckpointError("the disk is full")

    return save


def test_failed_scheduled_save_is_logged_and_training_continues(caplog):
    assert run_saving(full_disk({3})).iteration == 7
    assert caplog.messages == ["iteration 3 was not saved, training continues: the disk is full"]


def test_a_last_save_that_fails_fails_the_training():
    with pytest.raises(NeoXError, match="cannot save the training's last iteration, 7: the disk is full"):
        run_saving(full_disk({7}))


@pytest.mark.parametrize("iteration", [3, 7])
def test_a_save_that_fails_on_a_full_disk_has_a_remedy(caplog, iteration):
    def save(state):
        if state.iteration == iteration:
            # As the failure of any rank is reported on all of them.
            raise CheckpointError(f"saving x failed: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}")

    remedy = "No space left on device; free disk space"
    if iteration == 7:
        with pytest.raises(NeoXError) as raised:
            run_saving(save)
        assert str(raised.value).endswith(f"{remedy}, then start again from the latest checkpoint")
    else:
        run_saving(save)
        assert caplog.messages[0].endswith(remedy)


class Slow:
    """Background saves that take two iterations, or until they are waited for; some fail."""

    def __init__(self, failing=()):
        self.calls, self.iteration, self._failing, self._remaining = [], None, failing, 0

    def start(self, state):
        assert self.iteration is None
        self.calls.append(f"start {state.iteration}")
        self.iteration, self._remaining = state.iteration, 2

    def prepare(self):
        self.calls.append("prepare")

    def proceed(self):
        self._remaining -= 1
        if self._remaining == 0:
            self._end("done")

    def finish(self):
        if self.iteration is not None:
            self._end("waited for")

    def settle(self):
        assert self.iteration is None

    def _end(self, how):
        iteration, self.iteration = self.iteration, None
        if iteration in self._failing:
            raise CheckpointError("the writer was killed")
        self.calls.append(f"{how} {iteration}")


def save_in_background(slow, *, interval, last, extra=(), before_save=lambda: None):
    hook = CheckpointCallback(
        lambda state: slow.calls.append(f"save {state.iteration}"),
        interval=interval,
        extra=extra,
        background=Background(slow.start, slow, slow.prepare),
        timers=Timers(),
        before_save=before_save,
    )
    run(hook, last=last)
    return slow.calls


def test_a_save_in_the_background_is_waited_for_by_the_next_one_and_the_last_is_synchronous():
    calls = save_in_background(Slow(), interval=3, last=7)
    assert calls == ["prepare", "start 3", "done 3", "start 6", "waited for 6", "save 7"]
    calls = save_in_background(Slow(), interval=1, last=3, extra=(0,))
    assert calls == [
        *("start 0", "prepare", "waited for 0", "start 1", "waited for 1", "start 2", "waited for 2"),
        "save 3",
    ]


@pytest.mark.parametrize("last", [4, 7])
def test_a_save_in_the_background_that_fails_is_logged_and_training_continues(caplog, last):
    calls = save_in_background(Slow(failing={3}), interval=3, last=last)
    assert caplog.messages == ["iteration 3 was not saved, training continues: the writer was killed"]
    rest = ["save 4"] if last == 4 else ["start 6", "waited for 6", "save 7"]
    assert calls == ["prepare", "start 3", *rest]


def test_a_save_under_way_is_complete_before_the_state_is_checked():
    slow = Slow()

    def refuse():
        slow.calls.append("check")
        if "start 3" in slow.calls:
            raise CheckpointError("the loss is nan")

    message = "cannot save the training's last iteration, 4: the loss is nan"
    with pytest.raises(NeoXError, match=message):
        save_in_background(slow, interval=3, last=4, before_save=refuse)
    assert slow.calls == ["prepare", "check", "start 3", "waited for 3", "check"]


def test_a_failed_preparation_is_a_warning_and_the_save_reports_the_reason(caplog):
    slow = Slow()
    slow.prepare = Mock(side_effect=CheckpointError("this state cannot be saved"))
    assert save_in_background(slow, interval=3, last=4) == ["start 3", "waited for 3", "save 4"]
    slow.prepare.assert_called_once_with()
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "cannot prepare asynchronous saves: this state cannot be saved")
    ]


# Evaluating


class Numbers:
    """A stream of numbers that remembers being closed."""

    def __init__(self, first, log):
        self._next = first // 2  # two samples per micro-batch
        self._log = log

    def __iter__(self):
        return self

    def __next__(self):
        self._log.append(self._next)
        self._next += 1
        return self._log[-1]

    def close(self):
        self._log.append("closed")


def make_evaluate_hook(log, write=lambda metrics, iteration: None, interval=2, **options):
    streams = {"valid": lambda first: Numbers(first, log)}
    evaluator = Evaluator(
        CountingStep().evaluate, streams, iterations=3, accumulation=2, samples_per_iteration=SAMPLES
    )
    options = {"stop": StopCallback(SINGLE_RANK, exit_interval=None)} | options
    hook = EvaluateCallback(evaluator, write=write, **options)
    return evaluator, ReserveCallback(evaluator.samples, interval=interval), hook


def test_each_evaluation_reads_on_where_the_one_before_ended():
    log = []
    run(*make_evaluate_hook(log)[1:], last=4)
    assert log == [0, 1, 2, 3, 4, 5, "closed", 12, 13, 14, 15, 16, 17, "closed"]


@pytest.mark.parametrize("half", [3, 4])
def test_a_resumed_training_evaluates_on_the_same_data_as_an_uninterrupted_one(half):
    uninterrupted, first_half, second_half = [], [], []
    run(*make_evaluate_hook(uninterrupted)[1:], last=5)
    stopped = run(StopCallback(SINGLE_RANK, exit_interval=half), *make_evaluate_hook(first_half)[1:], last=5)
    evaluated = stopped.validation_samples
    run(*make_evaluate_hook(second_half)[1:], last=5, iteration=half, evaluated=evaluated)
    assert first_half + second_half == uninterrupted


def test_a_resumed_training_evaluates_what_follows_at_another_interval():
    log = []
    stopped = run(StopCallback(SINGLE_RANK, exit_interval=4), *make_evaluate_hook(log)[1:], last=9)
    assert log == [*range(6), "closed", *range(6, 12), "closed"]
    log.clear()
    evaluated = stopped.validation_samples
    run(*make_evaluate_hook(log, interval=3)[1:], last=8, iteration=4, evaluated=evaluated)
    assert log == [*range(12, 18), "closed", *range(18, 24), "closed"]


def test_urgent_stop_skips_the_evaluation():
    log, hurried = [], Hook()
    hurried.on_step = lambda state, report: state.request_stop("a signal asked for it", is_hurried=True)
    stopped = run(hurried, *make_evaluate_hook(log, interval=1)[1:], last=5)
    assert log == []
    assert (stopped.due_validation, stopped.validation_samples) == (0, 3 * SAMPLES)


def signal_in_batch(number):
    """Return a list to which a stream adds its batches, and a signal arrives with the one of this number."""

    class Batches(list):
        def append(self, item):
            super().append(item)
            if item == number:
                os.kill(os.getpid(), signal.SIGTERM)

    return Batches()


@pytest.mark.parametrize("is_saved_before", [False, True])
def test_a_stop_in_an_evaluation_ends_it_saves_once_and_a_resumed_training_begins_with_it(is_saved_before):
    uninterrupted, log, resumed, saved = [], signal_in_batch(7), [], []
    run(*make_evaluate_hook(uninterrupted)[1:], last=7)
    checkpoint = CheckpointCallback(
        lambda state: saved.append(state.state_dict()),
        interval=4 if is_saved_before else 100,
        timers=Timers(),
        before_save=lambda: None,
    )
    stop = StopCallback(SINGLE_RANK, exit_interval=None)
    _, reserve, evaluate = make_evaluate_hook(log, stop=stop, save_last=checkpoint.save_last)
    state = run(stop, reserve, checkpoint, evaluate, last=7)
    # It arrives with 7, is sent behind it, and received behind 8.
    assert log == [0, 1, 2, 3, 4, 5, "closed", 6, 7, 8, "closed"]
    assert (state.iteration, state.stop_reason) == (4, "SIGTERM received")
    [last] = saved
    assert (last["iteration"], last["due_validation"]) == (4, 12)
    position = {"iteration": 4, "evaluated": last["validation_samples"], "due": last["due_validation"]}
    run(*make_evaluate_hook(resumed)[1:], last=7, **position)
    assert [*log[:7], *resumed] == uninterrupted


def test_an_evaluation_that_is_complete_when_the_training_stops_is_not_repeated():
    saved = []
    checkpoint = CheckpointCallback(
        lambda state: saved.append((state.iteration, state.due_validation)),
        interval=None,
        timers=Timers(),
        before_save=lambda: None,
    )
    stop = StopCallback(SINGLE_RANK, exit_interval=4)
    _, reserve, evaluate = make_evaluate_hook([], stop=stop, save_last=checkpoint.save_last)
    run(stop, reserve, checkpoint, evaluate, last=7)
    # Before the evaluation, which may take long or fail, and again behind it.
    assert saved == [(4, 12), (4, None)]


def test_an_evaluation_that_is_due_reads_batches_of_the_size_of_the_resumed_run():
    log = []
    # It was due for 4 samples, and reads 12.
    state = run(*make_evaluate_hook(log)[1:], last=5, iteration=4, evaluated=8, due=4)
    assert log == [*range(2, 8), "closed", *range(8, 14), "closed"]
    assert state.validation_samples == 16


def test_without_evaluations_the_samples_of_one_that_is_due_stay_reserved():
    evaluator, *hooks = make_evaluate_hook(log := [])
    evaluator._micro_batches = 0
    state = run(*hooks, last=5, iteration=4, evaluated=8, due=4)
    assert (log, state.validation_samples, state.due_validation) == ([], 8, None)


def test_a_stop_in_the_evaluation_at_the_end_ends_it_and_restores_the_handlers_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    log = signal_in_batch(1)
    stop = StopCallback(SINGLE_RANK, exit_interval=None)
    state = run(stop, *make_evaluate_hook(log, stop=stop, interval=None)[1:], last=3)
    assert (log, state.stop_reason) == ([0, 1, 2, "closed"], "SIGTERM received")
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_result_is_the_plain_mean_and_its_exponential():
    evaluator, *hooks = make_evaluate_hook([])
    run(*hooks, last=1)
    result = evaluator.results["valid"]
    assert result == Evaluation(2.5)
    assert result.perplexity == pytest.approx(math.exp(2.5))
    assert str(result) == "loss 2.5000, perplexity 12.18"


def test_an_evaluation_without_a_target_names_the_reason():
    assert str(Evaluation(math.nan)).startswith("loss nan: no token of the samples counts in the loss")
    assert math.isnan(Evaluation(math.nan).perplexity)


def test_a_loss_beyond_floats_has_infinite_perplexity():
    assert Evaluation(1000.0).perplexity == math.inf


def test_a_slow_evaluation_is_logged_and_the_last_one_only_returned(caplog, monkeypatch):
    caplog.set_level("INFO")
    now = iter(range(0, 1000, 2))
    monkeypatch.setattr(evaluate, "ProgressLines", partial(ProgressLines, clock=lambda: float(next(now))))
    run(*make_evaluate_hook([])[1:], last=4)
    assert caplog.messages == [
        "validation: starting, 6 micro-batches",
        "validation: 2 of 6 micro-batches, 8 s left",
        "iteration 2: validation loss 2.5000, perplexity 12.18",
        "validation: starting, 6 micro-batches",
        "validation: 2 of 6 micro-batches, 8 s left",
    ]


def test_the_start_of_an_evaluation_is_logged_before_its_only_batch(caplog):
    caplog.set_level("INFO")

    def mean_loss(batches, count, is_stopping):
        caplog.records.append(logging.makeLogRecord({"msg": "computing"}))
        assert (next(batches), count) == (0, 1)
        return torch.tensor(1.0)

    streams = {"valid": lambda first: Numbers(first, [])}
    evaluator = Evaluator(mean_loss, streams, iterations=1, accumulation=1, samples_per_iteration=1)
    evaluator.evaluate("valid", 0)
    start = "validation: starting, 1 micro-batch"
    assert [record.getMessage() for record in caplog.records] == [start, "computing"]


def test_a_stopped_training_is_not_evaluated_at_its_end():
    evaluator, *hooks = make_evaluate_hook([], interval=None)
    run(StopCallback(SINGLE_RANK, exit_interval=2), *hooks, last=5)
    assert evaluator.results == {}


# Logging


class Memory:
    def __init__(self):
        self.lines = []

    def write(self, metrics, iteration):
        self.lines.append((iteration, dict(metrics)))

    def flush(self):
        pass

    def close(self):
        pass


def make_log_hook(writers, *, interval=2, phases=None, clock=time.monotonic):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    curve = WarmupThenDecay(style="linear", peak=1.0, floor=0.0, warmup=0.0, decay_iterations=10)
    schedule = LearningRateSchedule(optimizer, curve)
    throughput = Throughput(flops_per_token=1.0, causal_flops_per_token=1.0, num_devices=1)

    class Engine(Callback):
        """Steps the schedule as the engine does: before any other hook, when the update was applied."""

        def on_step(self, state, report):
            if not report.skipped:
                schedule.step()

    log = LogCallback(
        writers,
        schedule=schedule,
        throughput=throughput,
        timers=Timers(),
        interval=interval,
        phases=phases,
        clock=clock,
    )
    return Engine(), log


def test_every_iteration_is_written_with_the_rate_its_update_used():
    memory = Memory()
    run(*make_log_hook([memory]), last=5)
    shown = [(number, m["loss/train"], m["optimizer/learning_rate"]) for number, m in memory.lines]
    # The third update is skipped, so the fourth uses the same rate.
    assert shown == [(1, 10.0, 1.0), (2, 9.0, 0.9), (3, 8.0, 0.8), (4, 7.0, 0.8), (5, 6.0, 0.7)]
    assert {m["optimizer/grad_norm"] for _, m in memory.lines} == {0.5}


def test_speed_is_written_once_per_interval_and_interval_ends_are_read_one_iteration_late():
    memory, written = Memory(), []

    class Watcher(Callback):
        def on_step(self, state, report):
            written.append(len(memory.lines))

    run(*make_log_hook([memory]), Watcher(), last=5)
    assert written == [0, 0, 2, 2, 4]
    assert [number for number, m in memory.lines if "throughput/tokens_per_second" in m] == [2, 4, 5]


def test_the_time_left_counts_evaluations_and_leaves_pauses_out():
    memory, now = Memory(), [0.0]

    class Clock(Callback):
        """An iteration takes 1 s, and the evaluation after each second one 6 s."""

        def on_step(self, state, report):
            now[0] += 1.0 + 6.0 * (state.iteration % 2 == 0)

    engine, log = make_log_hook([memory], interval=4, clock=lambda: now[0])
    run(engine, log, Clock(), last=40)
    left = {number: m["time/left"] for number, m in memory.lines if "time/left" in m}
    assert left[4] == pytest.approx(
        (1 + 7 + 1) / 3 * 36, rel=0.01
    )  # Of the first iteration only the end counts.
    assert left[24] == pytest.approx(4.0 * 16, rel=0.05)
    state = TrainState(last_iteration=100, samples_per_iteration=SAMPLES, iteration=40)
    log.on_pause(state)
    now[0] += 10_000.0
    log.on_resume(state)
    report = StepReport(loss=torch.tensor(0.0), grad_norm=None, skipped=False, tokens=8)
    for state.iteration in (41, 42, 43, 44):
        log.on_step(state, report)
        now[0] += 4.0
    log.write_pending()
    assert memory.lines[-1][1]["time/left"] == pytest.approx(4.0 * 56, rel=0.1)


def test_the_first_iteration_is_logged_if_its_metrics_come_later(caplog):
    caplog.set_level("INFO")
    run(*make_log_hook([Memory()], interval=10), last=25, iteration=12)
    (line,) = caplog.messages
    assert re.fullmatch(
        r"iteration 13/25 after 0\.\d s; the next line of metrics follows iteration 20",
        line,
    )
    caplog.clear()
    run(*make_log_hook([Memory()], interval=10), last=12, iteration=9)
    assert caplog.messages == []


def test_a_long_interval_is_not_silent(caplog):
    caplog.set_level("INFO")
    # Ten seconds pass in each iteration.
    clock = iter(range(0, 10_000, 10))
    now = [0.0]
    engine, log = make_log_hook([Memory()], interval=12, clock=lambda: now[0])

    class Watch(Callback):
        def on_step(self, state, report):
            now[0] = float(next(clock))

    run(engine, Watch(), log, last=15)
    follows = "the next line of metrics follows iteration 12"
    assert [line for line in caplog.messages if line.endswith(follows)] == [
        f"iteration 1/15 after 0.0 s; {follows}",
        f"iteration 4/15 after 30.0 s; {follows}",
        f"iteration 7/15 after 30.0 s; {follows}",
        f"iteration 10/15 after 30.0 s; {follows}",
    ]


def test_phases_before_a_pause_do_not_count_in_the_interval_after_it():
    clock = iter(range(1000))
    memory, phases = Memory(), Phases(clock=lambda: float(next(clock)))
    engine, log = make_log_hook([memory], interval=10, phases=phases)

    class Step(CountingStep):
        def __call__(self, batches):
            # One second by this clock.
            with phases.measure("forward"):
                return super().__call__(batches)

    state = TrainState(last_iteration=4, samples_per_iteration=SAMPLES)
    loop = Loop(state, Step(), iter(range(100)), [engine, log])
    loop.run(3)
    loop.run()
    assert memory.lines[-1][1]["time/forward"] == 1.0


def test_pending_metrics_are_written_before_a_checkpoint():
    memory = Memory()
    engine, log = make_log_hook([memory], interval=100)
    seen = []
    save = CheckpointCallback(
        lambda state: seen.append(len(memory.lines)),
        interval=2,
        timers=Timers(),
        before_save=log.write_pending,
    )
    run(engine, log, save, last=4)
    assert seen == [2, 4]


def test_without_writers_nothing_is_kept():
    engine, log = make_log_hook([])
    run(engine, log)
    log.write_pending()


@pytest.mark.slow
def test_garbage_is_collected_by_iteration_and_the_automatic_collector_comes_back():
    collected = []

    class Watcher(Callback):
        def on_step(self, state, report):
            collected.append(gc.isenabled())

    run(GarbageCollection(interval=2), Watcher(), last=3)
    assert collected == [False] * 3
    assert gc.isenabled()


@pytest.mark.slow
def test_a_program_without_automatic_collection_stays_without():
    gc.disable()
    try:
        state = TrainState(last_iteration=4, samples_per_iteration=SAMPLES)
        loop = Loop(state, CountingStep(), iter(range(100)), [GarbageCollection()])
        for iterations in (2, None):
            loop.run(iterations)
            assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_record_of_a_resumed_training_is_that_of_an_uninterrupted_one(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def train_part(folder, iteration, *hooks):
        writer = JsonlWriter(folder, iteration=iteration)
        _, log = make_log_hook([writer], interval=1)
        run(*hooks, log, last=6, iteration=iteration)
        writer.close()
        return [record["loss/train"] for record in read_metrics(folder / "metrics.jsonl")]

    whole = train_part(tmp_path / "whole", 0)
    train_part(tmp_path / "parts", 0, StopCallback(SINGLE_RANK, exit_interval=3))
    assert train_part(tmp_path / "parts", 3) == whole
