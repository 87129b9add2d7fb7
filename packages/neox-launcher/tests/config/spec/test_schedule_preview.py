"""The learning rate of a configuration, against GPT-NeoX's formula for each update."""

import math

import pytest

from neox_config import resolve
from neox_config.spec.schedule_preview import learning_rate, spread_iterations


def gpt_neox_rate(update, *, peak, minimum, warmup, decay):
    """Return the rate of a cosine decay as GPT-NeoX computes it, with the warmup in iterations."""
    if update <= warmup:
        # A warmup of less than one iteration exceeds the peak there, and does not here.
        return min(peak, peak * max(1, update) / warmup)
    cosine = math.cos(math.pi * (update - warmup) / (decay - warmup))
    return max(minimum, minimum + (peak - minimum) / 2 * (cosine + 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("warmup: 0.2", {"minimum": 0.0, "warmup": 20, "decay": 100}),
        ("warmup-iters: 30", {"minimum": 0.0, "warmup": 30, "decay": 100}),
        ("warmup-iters: 7\ndecay-lr-to: 0.25", {"minimum": 0.00025, "warmup": 7, "decay": 100}),
        ("lr-decay-fraction: 0.555", {"minimum": 0.0, "warmup": 0.55, "decay": 55}),
        ("lr-decay-iters: 60\nmin-lr: 0.0001", {"minimum": 0.0001, "warmup": 0.6, "decay": 60}),
    ],
)
def test_the_rate_is_that_of_gpt_neox(load, text, expected):
    resolved = resolve(load(text, "train-iters=100", "lr-decay-style=cosine"), devices=1)
    assert resolved.update.decay_iterations == expected["decay"]
    for update in range(expected["decay"]):
        rate = gpt_neox_rate(update, peak=0.001, **expected)
        assert learning_rate(resolved, update) == pytest.approx(rate, abs=1e-15)


def test_a_curve_shows_the_end_of_the_warmup(load):
    resolved = resolve(load("warmup-iters: 30", "train-iters=100"), devices=1)
    assert spread_iterations(resolved, 2) == [0, 30, 99]
    assert learning_rate(resolved, 30) == pytest.approx(0.001)
