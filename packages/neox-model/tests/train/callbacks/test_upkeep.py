import gc
from types import SimpleNamespace

import pytest

from neox_model.train.callbacks.upkeep import GarbageCollection, LocalSteps
from neox_model.train.loop import Loop
from neox_model.train.state import TrainState
from support.runs import SAMPLES, AfterStep, a_run, count


@pytest.mark.slow
def test_garbage_is_collected_by_iteration_and_the_automatic_collector_comes_back():
    enabled = []
    count(GarbageCollection(interval=2), AfterStep(lambda run: enabled.append(gc.isenabled())), last=3)
    assert enabled == [False] * 3
    assert gc.isenabled()


@pytest.mark.slow
def test_a_program_without_automatic_collection_stays_without():
    gc.disable()
    try:
        state = TrainState(last_iteration=4, samples_per_iteration=SAMPLES)
        loop = Loop(a_run(GarbageCollection(), state=state), iter(range(100)))
        for iterations in (2, None):
            loop.run(iterations)
            assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("stop_reason", [None, "SIGTERM received"])
@pytest.mark.parametrize("replicas_differ", [False, True])
def test_only_a_training_that_reached_its_end_is_advised_on_its_length(caplog, replicas_differ, stop_reason):
    state = TrainState(last_iteration=9, samples_per_iteration=4, iteration=9, stop_reason=stop_reason)
    a_run(callback := LocalSteps(SimpleNamespace(replicas_differ=replicas_differ)), state=state)
    callback.on_end()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == replicas_differ
    for warning in warnings:
        assert warning.startswith("the run ends in iteration 9 between two averages")
        assert ("set train-iters" in warning) == (stop_reason is None)
