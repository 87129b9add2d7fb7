"""Which learning-rate schedules a checkpoint of wsd may be continued with."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from neox_config.derive.learning_rate import learning_rate_curve
from neox_config.facts.learning_rate import Curve
from neox_config.spec.refusals import other_schedule
from support.settings import resolved_from

STABLE: dict[str, Any] = {
    "lr_decay_style": "wsd",
    "warmup_iters": 10,
    "train_iters": 100,
    "lr_wsd_decay_iters": 20,
    "min_lr": 1e-4,
}


def curve_of(settings: dict[str, Any]) -> Curve:
    resolved = resolved_from(STABLE | settings)
    return learning_rate_curve(resolved.config, decay_iterations=resolved.update.decay_iterations)


def recorded(applied: int, **settings: Any) -> dict[str, Any]:
    """Return what a checkpoint has of the schedule after this number of updates."""
    curve = curve_of(settings)
    stored = {"class": type(curve).__name__, "curve": asdict(curve), "applied_updates": applied}
    return json.loads(json.dumps(stored))


BRANCH = {"train_iters": 60, "lr_wsd_decay_iters": 10}
TWICE = {"train_iters": 300, "lr_wsd_decays": [100]}


@pytest.mark.parametrize(
    ("applied", "before", "now"),
    [
        (50, {}, {}),
        (50, {}, BRANCH),
        (50, {}, BRANCH | {"lr_wsd_decay_style": "cosine", "min_lr": 0.0}),
        (80, {}, {"train_iters": 900}),
        # Decayed to the end, then continued from the decayed weights.
        (100, {}, TWICE),
        (200, TWICE, TWICE | {"train_iters": 900, "lr_wsd_decays": [100, 300]}),
        (5, {}, {"train_iters": 900}),
    ],
)
def test_a_schedule_of_wsd_may_change_in_the_updates_to_come(applied, before, now):
    assert other_schedule(recorded(applied, **before), curve_of(now)) is None


@pytest.mark.parametrize(
    ("applied", "before", "now"),
    [
        # The recorded one decayed already, or the new one would have.
        (82, {}, {"train_iters": 900}),
        (52, {}, BRANCH),
        (100, {}, {"train_iters": 300}),
        (100, {}, TWICE | {"lr_wsd_decay_style": "cosine"}),
        (50, {}, {"optimizer": {"type": "Adam", "params": {"lr": 0.02}}}),
        (50, {}, {"warmup_iters": 11}),
        (50, {}, {"lr_decay_style": "constant"}),
        (50, {"lr_decay_style": "linear"}, {"lr_decay_style": "linear", "train_iters": 200}),
        # In the warmup, where the two constants are equal.
        (50, {"lr_decay_style": "constant"}, {"lr_decay_style": "constant", "train_iters": 200}),
    ],
)
def test_a_schedule_that_changes_the_updates_so_far_is_refused(applied, before, now):
    assert other_schedule(recorded(applied, **before), curve_of(now)) is not None


def test_a_record_without_a_count_or_with_an_unknown_class_is_no_schedule_of_wsd():
    whole = recorded(50)
    for damaged in (
        {**whole, "applied_updates": None},
        {**whole, "class": "Other"},
        {**whole, "curve": whole["curve"] | {"style": "other"}},
    ):
        assert other_schedule(damaged, curve_of(BRANCH)) is not None
