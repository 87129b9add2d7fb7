import pytest

from neox_model.checkpoint.sample_order import change_of_order

HERE = {
    "samples_per_iteration": 32,
    "sample_order": "gpt_neox",
    "train_iters": 100,
    "seed": 1,
    "train_data_paths": ["a", "b"],
    "hidden_size": 64,
}


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ({}, None),
        ({"hidden_size": 32}, None),
        ({"samples_per_iteration": 16}, "samples-per-iteration was 16, is 32"),
        ({"train_iters": 50}, "train-iters was 50, is 100"),
        (
            {"train_data_paths": ["a"], "seed": 2},
            "seed was 2, is 1; train-data-paths was ['a'], is ['a', 'b']",
        ),
    ],
)
def test_what_decides_the_order_is_told_when_it_changed(stored, told):
    assert change_of_order(HERE | stored, HERE) == told


def test_the_lazy_order_does_not_ask_how_long_training_is():
    here = HERE | {"sample_order": "lazy"}
    assert change_of_order(here | {"train_iters": 50}, here) is None
    assert change_of_order(here | {"seed": 2}, here) == "seed was 2, is 1"


def test_a_checkpoint_that_does_not_say_it_is_taken_as_it_is():
    assert change_of_order({"seed": 1}, HERE) is None
