"""Which entries of the training loop's state are compared as counters."""

import pytest
import torch

from neox_model.checkpoint.comparison import counters_of
from neox_model.train.recent_losses import RecentLosses
from neox_model.train.state import TrainState
from neox_model.verify.steps import common


@pytest.mark.parametrize("result", [None, {"samples": 4, "loss": 2.0}])
def test_the_result_of_a_forward_pass_and_an_evaluation_that_is_due_are_not_counters(result):
    state = TrainState(last_iteration=9, samples_per_iteration=4, forward_pass=result)
    counters = counters_of(state.state_dict())
    assert counters.keys() == state.state_dict().keys() - {"forward_pass", "due_validation"}


def test_recent_losses_are_compared_only_to_the_last_bit():
    losses = RecentLosses(2, torch.device("cpu"))
    losses.load([1.0, 2.0])
    state = TrainState(last_iteration=9, samples_per_iteration=4, samples=8, recent_losses=losses)
    counters = {f"training.{name}": value for name, value in counters_of(state.state_dict()).items()}
    assert counters["training.recent_losses"] == [1.0, 2.0]
    other = counters | {"training.recent_losses": [1.0, 2.0000001], "training.samples": 12}
    wanted, found = common(counters, other)
    assert [name for name in wanted if wanted[name] != found[name]] == ["training.samples"]
