import math

import pytest

from neox_config.facts.learning_rate import (
    DECAY_STYLES,
    FINAL_DECAYS,
    RepeatedDecay,
    WarmupStableDecay,
    WarmupThenDecay,
)

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


# By hand: 2 updates of warmup to 0.5, constant until 6, then 4 updates down to 0.1.
STABLE = {
    "linear": [0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1],
    "cosine": [
        *(0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5),
        *(0.3 + 0.2 * math.cos(math.pi * part / 4) for part in (1, 2, 3)),
        *(0.1, 0.1),
    ],
    "1-sqrt": [
        *(0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5),
        *(0.5 - 0.4 * math.sqrt(part / 4) for part in (1, 2, 3)),
        *(0.1, 0.1),
    ],
}


@pytest.mark.parametrize("style", FINAL_DECAYS)
def test_a_stable_rate_decays_in_the_last_updates(style):
    curve = WarmupStableDecay(style=style, peak=0.5, floor=0.1, warmup=0.2, iterations=10, decay_iterations=4)
    assert [curve.rate(update) for update in range(12)] == pytest.approx(STABLE[style], abs=1e-12)
    assert curve.turns() == (2, 6, 10)


def test_more_iterations_change_no_rate_before_the_decay():
    short, long = (
        WarmupStableDecay(
            style="1-sqrt", peak=0.5, floor=0.1, warmup=2 / total, iterations=total, decay_iterations=4
        )
        for total in (16, 64)
    )
    assert [short.rate(update) for update in range(12)] == [long.rate(update) for update in range(12)]


def test_a_repeated_decay_is_followed_by_the_peak():
    curve = RepeatedDecay(
        style="linear",
        peak=0.5,
        floor=0.1,
        warmup=0.1,
        iterations=20,
        decay_iterations=4,
        earlier=((6, 2), (10, 4)),
    )
    assert [curve.rate(update) for update in range(22)] == pytest.approx(
        # From the warmup until update 6, until update 10, until update 20, and after it.
        [0.25, 0.25, 0.5, 0.5, 0.5, 0.3, *(0.5, 0.4, 0.3, 0.2), *[0.5] * 7, 0.4, 0.3, 0.2, 0.1, 0.1],
        abs=1e-12,
    )
    assert curve.turns() == (2, 4, 6, 6, 10, 16, 20)
