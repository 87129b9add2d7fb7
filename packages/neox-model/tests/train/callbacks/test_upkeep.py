import gc

import pytest

from neox_model.train.callbacks.upkeep import GarbageCollection
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
