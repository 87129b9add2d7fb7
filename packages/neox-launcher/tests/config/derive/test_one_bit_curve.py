"""The learning rate of OneBitAdam: WarmupDecayLR from lr, min-lr and warmup, as GPT-NeoX documents it."""

import math

import pytest

from neox_config.derive.learning_rate import learning_rate_curve
from neox_config.facts.deepspeed_schedules import WarmupDecayLR

SETTINGS = "min-lr: 0.001\nwarmup: 0.05\nlr-decay-style: constant"


def curve_of(load, text, *, kind="OneBitAdam"):
    config = load(text, f"optimizer.type={kind}", "optimizer.params.lr=0.011", "train_iters=200")
    return learning_rate_curve(config, decay_iterations=config.lr_schedule.lr_decay_iters or 200)


def test_it_rises_with_the_logarithm_and_falls_in_a_line(load):
    curve = curve_of(load, SETTINGS)
    assert isinstance(curve, WarmupDecayLR)
    # DeepSpeed counts from -1: update u has the rate of step u - 1. The warmup has 0.05 * 200 steps.
    for update, expected in {
        0: 0.001,
        1: 0.001,
        4: 0.001 + 0.01 * math.log(4) / math.log(10),
        10: 0.011,
        106: 0.001 + 0.01 * (200 - 105) / 190,
        201: 0.001,
        300: 0.001,
    }.items():
        assert curve.rate(update) == pytest.approx(expected, rel=1e-12), update


def test_the_warmup_is_a_part_of_all_iterations_and_the_decay_ends_at_lr_decay_iters(load):
    curve = curve_of(load, f"{SETTINGS}\nlr-decay-iters: 100")
    assert (curve.warmup_num_steps, curve.total_num_steps) == (10, 100)
    assert curve.rate(101) == pytest.approx(0.001)


def test_a_warmup_of_nothing_has_one_step(load):
    assert curve_of(load, "warmup: 0.0").warmup_num_steps == 1


def test_a_scheduler_is_used_instead(load):
    curve = curve_of(load, "scheduler: {type: WarmupLR, params: {warmup_num_steps: 5}}")
    assert type(curve).__name__ == "WarmupLR"


def test_other_optimizers_follow_lr_decay_style(load):
    assert curve_of(load, SETTINGS, kind="Adam").rate(150) == 0.011
