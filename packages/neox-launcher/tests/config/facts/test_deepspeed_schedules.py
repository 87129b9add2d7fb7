"""By hand; tests/integration/test_deepspeed_schedules.py compares every value with DeepSpeed's classes."""

import math

import pytest

from neox_config.facts.deepspeed_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

WARMUP = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
COSINE = {
    "lr": 0.5,
    "total_num_steps": 8,
    "warmup_min_ratio": 0.2,
    "warmup_num_steps": 4,
    "cos_min_ratio": 0.1,
}
CYCLE = {
    "cycle_min_lr": 0.1,
    "cycle_max_lr": 0.5,
    "decay_lr_rate": 1.0,
    "cycle_first_step_size": 4,
    "cycle_second_step_size": 2,
    "cycle_first_stair_count": 0,
    "cycle_second_stair_count": 0,
    "decay_step_size": 2,
    "cycle_momentum": True,
    "cycle_min_mom": 0.5,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.01,
}


def values(curve, count):
    return pytest.approx([curve.rate(update) for update in range(count)])


def test_a_warmup_begins_with_two_updates_at_the_smallest_rate():
    assert values(WarmupLR(**WARMUP, warmup_type="linear"), 8) == [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5]
    logarithm = [0.1 + 0.4 * math.log(step) / math.log(4) for step in (1, 1, 2, 3, 4)]
    assert values(WarmupLR(**WARMUP, warmup_type="log"), 6) == [*logarithm, 0.5]


def test_a_decay_ends_at_the_smallest_rate_and_stays():
    curve = WarmupDecayLR(**WARMUP, warmup_type="linear", total_num_steps=8)
    assert values(curve, 11) == [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]
    assert curve.turns() == (5, 9)


def test_a_cosine_ends_at_its_ratio_and_stays():
    fall = [0.5 * (0.1 + 0.45 * (1 + math.cos(math.pi * part / 4))) for part in (1, 2, 3, 4)]
    curve = WarmupCosineLR(**COSINE, warmup_type="linear")
    assert values(curve, 11) == [0.0, 0.1, 0.2, 0.3, 0.4, *fall, 0.05, 0.05]


def test_a_cycle_rises_falls_and_decays_with_the_opposite_momentum():
    curve = OneCycle(**CYCLE)
    assert values(curve, 9) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.1 / 2]
    momenta = [curve.momentum(update) for update in range(9)]
    assert momenta == pytest.approx([0.5, 0.8, 0.7, 0.6, 0.5, 0.7, 0.9, 0.9 * 1.005, 0.9 * 1.01])


def test_a_cycle_without_momentum_or_decay():
    curve = OneCycle(**CYCLE | {"cycle_momentum": False, "decay_step_size": 0})
    assert curve.momentum(3) is None
    assert not curve.changes_momentum
    assert curve.rate(1000) == 0.1


def test_a_cycle_in_stairs():
    curve = OneCycle(**CYCLE | {"cycle_first_stair_count": 2, "cycle_second_stair_count": 1})
    assert values(curve, 7) == [0.1, 0.1, 0.3, 0.3, 0.5, 0.1, 0.1]


def test_a_range_test_grows_in_every_update_or_in_stairs():
    settings = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0}
    continuous = LRRangeTest(**settings, lr_range_test_staircase=False)
    assert values(continuous, 4) == [0.1, 0.25, 0.4, 0.55]
    assert values(LRRangeTest(**settings, lr_range_test_staircase=True), 4) == [0.1, 0.1, 0.4, 0.4]


def test_a_second_rate_is_relative_to_the_largest_or_the_first_of_a_range_test():
    range_test = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0}
    curves = [
        WarmupLR(**WARMUP, warmup_type="linear"),
        WarmupDecayLR(**WARMUP, warmup_type="linear", total_num_steps=8),
        WarmupCosineLR(**COSINE, warmup_type="linear"),
        OneCycle(**CYCLE),
        LRRangeTest(**range_test, lr_range_test_staircase=False),
    ]
    assert [curve.reference for curve in curves] == [0.5, 0.5, 0.5, 0.5, 0.1]
