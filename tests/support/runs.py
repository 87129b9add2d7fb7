"""A run whose parts are given one by one, for tests of callbacks and of the loop."""

from types import SimpleNamespace

from neox_launcher.worker.reporting import Progress
from neox_model.metrics.bus import Metrics
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.train.loop import Loop
from neox_model.train.run import Run
from neox_model.train.state import TrainState

__all__ = ["a_run", "train"]


def a_run(state=None, *callbacks, config=None, writers=(), **parts):
    """Build a run of the given parts; others are absent, or do nothing."""
    defaults = dict.fromkeys(
        ("engine", "schedule", "tokenizer", "step", "evaluator", "throughput", "resolved"), None
    )
    if config is not None:
        defaults["resolved"] = SimpleNamespace(config=config)
    state = TrainState(last_iteration=10, samples_per_iteration=4) if state is None else state
    defaults |= {"groups": SINGLE_PROCESS, "datasets": {}, "streams": {}, "progress": Progress(0)}
    run = Run(**{**defaults, "metrics": Metrics(), "state": state, "callbacks": list(callbacks), **parts})
    run.metrics.writers = list(writers)
    return run


def train(run, batches, iterations=None):
    """Train a run on these batches, after its callbacks have loaded."""
    for callback in run.callbacks:
        callback.on_load(run)
    Loop(run, iter(batches)).run(iterations)
    return run.state
