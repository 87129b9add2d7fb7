"""A run whose parts are given one by one, for tests of callbacks and of the loop."""

from functools import cache

import torch

from neox_launcher.worker.reporting import Progress
from neox_model.metrics.bus import Metrics
from neox_model.metrics.events import Events
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.train.loop import Loop
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport, TrainState
from support.settings import resolved_from

__all__ = ["SAMPLES", "AfterStep", "CountingStep", "Record", "a_run", "count", "train"]

# Of an iteration: two micro-batches of two.
SAMPLES = 4


class Record:
    """A writer that keeps metrics and events."""

    def __init__(self):
        self.metrics, self.events = [], []

    def write(self, metrics, iteration):
        self.metrics.append((iteration, dict(metrics)))

    def event(self, kind, iteration, content):
        self.events.append((kind, iteration, dict(content)))

    def flush(self):
        pass

    def close(self):
        pass


class AfterStep(Callback):
    """Calls a function of the run after every iteration."""

    def __init__(self, call):
        self._call = call

    def on_step(self, report):
        self._call(self.run)


class CountingStep:
    """Loss = 10 - the batch's number; every third update overflows."""

    accumulation = 2

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


@cache
def _resolved():
    return resolved_from({})


def a_run(*callbacks, state=None, writers=(), **parts):
    """Build a run of the given parts; others are those of a small configuration, or absent."""
    absent = dict.fromkeys(("engine", "schedule", "tokenizer", "evaluator", "throughput"))
    state = TrainState(last_iteration=10, samples_per_iteration=SAMPLES) if state is None else state
    defaults = {"groups": SINGLE_PROCESS, "datasets": {}, "streams": {}, "progress": Progress(0)}
    defaults |= {"resolved": _resolved(), "step": CountingStep(), "metrics": Metrics()}
    run = Run(**{**absent, **defaults, "state": state, **parts})
    for callback in callbacks:
        run.add(callback)
    run.metrics.writers, run.events = list(writers), Events(list(writers))
    return run


def train(run, batches=(), iterations=None):
    """Train a run on these batches, after its callbacks have loaded."""
    for callback in run.callbacks:
        callback.on_load()
    Loop(run, iter(batches)).run(iterations)
    return run.state


def count(*callbacks, last=4, iteration=0, evaluated=0, due=None, **parts):
    """Train to iteration `last` with steps that count their batches, and return the state.

    Args:
        callbacks: of the run.
        last: the last iteration.
        iteration: the one of the checkpoint that the run continues.
        evaluated: the samples that this checkpoint's evaluations have used.
        due: the first sample of the evaluation that is due in it.
        parts: of the run.
    """
    state = TrainState(last_iteration=last, samples_per_iteration=SAMPLES, iteration=iteration)
    state.samples, state.validation_samples, state.due_validation = SAMPLES * iteration, evaluated, due
    return train(a_run(*callbacks, state=state, **parts), range(iteration, 100))
