import logging
import math
import os
import signal
from functools import partial

import pytest
import torch

from neox_model.metrics.progress_lines import ProgressLines
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.train import evaluate
from neox_model.train.callbacks.checkpoint import CheckpointCallback
from neox_model.train.callbacks.evaluate import EvaluateCallback, ReserveCallback
from neox_model.train.callbacks.stop import StopCallback
from neox_model.train.evaluate import Evaluation, Evaluator
from support.runs import SAMPLES, AfterStep, CountingStep, count


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


def evaluator_of(log, iterations=3):
    streams = {"valid": lambda first: Numbers(first, log)}
    return Evaluator(
        CountingStep().evaluate, streams, iterations=iterations, accumulation=2, samples_per_iteration=SAMPLES
    )


def stop_at(iteration):
    return StopCallback(SINGLE_RANK, exit_interval=iteration)


def evaluating(log, *, interval=2, stop=None, save=None, **settings):
    """Train with evaluations, saves before each, and stops; return the state.

    Args:
        log: receives what the evaluations read.
        interval: between evaluations.
        stop: the callback that stops; None: it stops at a signal only.
        save: saves; None: nothing is saved.
        settings: those of `count`.
    """
    stop = stop_at(None) if stop is None else stop
    saves = [] if save is None else [save]
    evaluate = EvaluateCallback(stop, *saves)
    settings = {"evaluator": evaluator_of(log)} | settings
    return count(stop, ReserveCallback(interval), *saves, evaluate, **settings)


def test_each_evaluation_reads_on_where_the_one_before_ended():
    log = []
    evaluating(log, last=4)
    assert log == [0, 1, 2, 3, 4, 5, "closed", 12, 13, 14, 15, 16, 17, "closed"]


@pytest.mark.parametrize("half", [3, 4])
def test_a_resumed_training_evaluates_on_the_same_data_as_an_uninterrupted_one(half):
    uninterrupted, first_half, second_half = [], [], []
    evaluating(uninterrupted, last=5)
    stopped = evaluating(first_half, stop=stop_at(half), last=5)
    evaluated = stopped.validation_samples
    evaluating(second_half, last=5, iteration=half, evaluated=evaluated)
    assert first_half + second_half == uninterrupted


def test_a_resumed_training_evaluates_what_follows_at_another_interval():
    log = []
    stopped = evaluating(log, stop=stop_at(4), last=9)
    assert log == [*range(6), "closed", *range(6, 12), "closed"]
    log.clear()
    evaluated = stopped.validation_samples
    evaluating(log, interval=3, last=8, iteration=4, evaluated=evaluated)
    assert log == [*range(12, 18), "closed", *range(18, 24), "closed"]


def test_urgent_stop_skips_the_evaluation():
    log = []
    hurry = AfterStep(lambda run: run.state.request_stop("a signal requested it", is_hurried=True))
    stopped = count(
        hurry, ReserveCallback(1), EvaluateCallback(stop_at(None)), evaluator=evaluator_of(log), last=5
    )
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
def test_a_stop_in_an_evaluation_ends_it_saves_once_and_a_resumed_training_begins_with_it(
    tmp_path, is_saved_before
):
    uninterrupted, log, resumed, saved = [], signal_in_batch(7), [], []
    evaluating(uninterrupted, last=7)
    save = CheckpointCallback(
        tmp_path,
        interval=4 if is_saved_before else 100,
        save=lambda run, folder: saved.append(run.state.state_dict()),
    )
    state = evaluating(log, save=save, last=7)
    # It arrives with 7, is sent behind it, and received behind 8.
    assert log == [0, 1, 2, 3, 4, 5, "closed", 6, 7, 8, "closed"]
    assert (state.iteration, state.stop_reason) == (4, "SIGTERM received")
    [last] = saved
    assert (last["iteration"], last["due_validation"]) == (4, 12)
    position = {"iteration": 4, "evaluated": last["validation_samples"], "due": last["due_validation"]}
    evaluating(resumed, last=7, **position)
    assert [*log[:7], *resumed] == uninterrupted


def test_an_evaluation_that_is_complete_when_the_training_stops_is_not_repeated(tmp_path):
    saved = []
    save = CheckpointCallback(
        tmp_path,
        interval=None,
        save=lambda run, folder: saved.append((run.state.iteration, run.state.due_validation)),
    )
    evaluating([], stop=stop_at(4), save=save, last=7)
    # Before the evaluation, which may take long or fail, and again behind it.
    assert saved == [(4, 12), (4, None)]


def test_an_evaluation_that_is_due_reads_batches_of_the_size_of_the_resumed_run():
    log = []
    # It was due for 4 samples, and reads 12.
    state = evaluating(log, last=5, iteration=4, evaluated=8, due=4)
    assert log == [*range(2, 8), "closed", *range(8, 14), "closed"]
    assert state.validation_samples == 16


def test_without_evaluations_the_samples_of_one_that_is_due_stay_reserved():
    evaluator = evaluator_of(log := [], iterations=0)
    state = evaluating(log, evaluator=evaluator, last=5, iteration=4, evaluated=8, due=4)
    assert (log, state.validation_samples, state.due_validation) == ([], 8, None)


def test_a_stop_in_the_evaluation_at_the_end_ends_it_and_restores_the_handlers_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    log = signal_in_batch(1)
    state = evaluating(log, interval=None, last=3)
    assert (log, state.stop_reason) == ([0, 1, 2, "closed"], "SIGTERM received")
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_result_is_the_plain_mean_and_its_exponential():
    evaluator = evaluator_of([])
    evaluating([], evaluator=evaluator, last=1)
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
    evaluating([], last=4)
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
    evaluator = evaluator_of([])
    evaluating([], evaluator=evaluator, interval=None, stop=stop_at(2), last=5)
    assert evaluator.results == {}
