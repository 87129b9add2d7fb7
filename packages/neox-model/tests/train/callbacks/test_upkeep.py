from types import SimpleNamespace

import pytest

from neox_model.train.callbacks.upkeep import LocalSteps
from neox_model.train.state import TrainState


@pytest.mark.parametrize("stop_reason", [None, "SIGTERM received"])
@pytest.mark.parametrize("replicas_differ", [False, True])
def test_only_a_training_that_reached_its_end_is_advised_on_its_length(caplog, replicas_differ, stop_reason):
    state = TrainState(last_iteration=9, samples_per_iteration=4, iteration=9, stop_reason=stop_reason)
    LocalSteps(SimpleNamespace(replicas_differ=replicas_differ)).on_end(state)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == replicas_differ
    for warning in warnings:
        assert warning.startswith("the training ends in iteration 9 between two averages")
        assert ("set train-iters" in warning) == (stop_reason is None)
