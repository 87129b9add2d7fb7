import math

import pytest

from neox_config.facts.learning_rate import DECAY_STYLES, WarmupThenDecay

# Computed by hand from the formulas: peak 0.4, floor 0.1, decay 10 updates, of which 2.5 are the warm-up.
TABLE = {
    "constant": {0: 0.16, 1: 0.16, 2: 0.32, 3: 0.4, 7: 0.4, 10: 0.4, 25: 0.4},
    "linear": {0: 0.16, 2: 0.32, 3: 0.4 * 7 / 7.5, 7: 0.4 * 3 / 7.5, 9: 0.1, 10: 0.1, 25: 0.1},
    "cosine": {0: 0.16, 2: 0.32, 5: 0.1 + 0.15 * (math.cos(math.pi / 3) + 1), 10: 0.1, 25: 0.1},
    "exponential": {
        0: 0.16,
        2: 0.32,
        5: 0.4 * math.exp(-0.231),
        10: 0.4 * math.exp(-0.693),
        25: 0.4 * math.exp(-0.693),
    },
}


def rates(style, **changes):
    settings = {"peak": 0.4, "floor": 0.1, "warmup": 0.25, "decay_iterations": 10} | changes
    return WarmupThenDecay(style=style, **settings)


@pytest.mark.parametrize("style", TABLE)
def test_rate_is_as_computed_by_hand(style):
    schedule = rates(style)
    computed = {update: schedule.rate(update) for update in TABLE[style]}
    assert computed == pytest.approx(TABLE[style], abs=1e-12)


def test_every_style_is_in_the_table():
    assert set(TABLE) == set(DECAY_STYLES)


def test_warmup_ignores_the_floor():
    assert rates("linear", floor=0.3).rate(1) == pytest.approx(0.16)


def test_warmup_shorter_than_one_update_does_not_overshoot():
    assert rates("cosine", warmup=0.01).rate(0) == pytest.approx(0.4)


def test_without_warmup_the_first_rate_is_the_peak():
    assert [rates(style, warmup=0.0).rate(0) for style in sorted(DECAY_STYLES)] == pytest.approx([0.4] * 4)


def test_warmup_over_everything_ends_at_the_peak_and_stays():
    schedule = rates("linear", warmup=1.0)
    assert [schedule.rate(5), schedule.rate(10), schedule.rate(11)] == pytest.approx([0.2, 0.4, 0.4])
