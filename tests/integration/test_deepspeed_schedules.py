"""The schedules of the `scheduler` block have the values of DeepSpeed's own classes, to the last bit."""

import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from neox_config.extras.data_efficiency.difficulty import fixed_root
from neox_config.facts.curves import CURVES
from neox_config.facts.deepspeed_schedules import ScheduleType

STEPS = 400
STARTS = (0, 1, 2, 57, 250)
LR = 0.003
SHAPES = ("log", "linear")
WARMUPS = [
    {"warmup_min_lr": 1e-5, "warmup_max_lr": 0.002, "warmup_num_steps": steps, "warmup_type": shape}
    for steps, shape in itertools.product((1, 2, 10, 130), SHAPES)
]
COSINES = [
    {"warmup_min_ratio": 0.03, "warmup_num_steps": steps, "cos_min_ratio": 0.07, "warmup_type": shape}
    for steps, shape in itertools.product((1, 10, 130), SHAPES)
]
CYCLES = [
    {
        "cycle_min_lr": 0.0003,
        "cycle_max_lr": 0.007,
        "decay_lr_rate": decay,
        "cycle_first_step_size": first,
        "cycle_second_step_size": second,
        "cycle_first_stair_count": stairs,
        "cycle_second_stair_count": second_stairs,
        "decay_step_size": 13 if decay else 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.77,
        "cycle_max_mom": 0.93,
        "decay_mom_rate": decay / 1000,
    }
    for first, second in ((1, 0), (100, 100), (33, 10), (7, 150))
    for stairs, second_stairs, decay in ((0, 0, 0.0), (0, 0, 0.3), (5, 3, 1.7), (0, 9, 0.3), (60, 0, 0.0))
]
RANGES = [
    {
        "lr_range_test_min_lr": 0.0001,
        "lr_range_test_step_size": size,
        "lr_range_test_step_rate": rate,
        "lr_range_test_staircase": staircase,
    }
    for size, rate, staircase in itertools.product((1, 7, 100), (0.0, 0.7, 3.0), (False, True))
]
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "WarmupLR": WARMUPS,
    "WarmupDecayLR": [
        warmup | {"total_num_steps": total} for warmup in WARMUPS for total in (130, 131, 300, 1000)
    ],
    "WarmupCosineLR": [
        cosine | {"total_num_steps": total} for cosine in COSINES for total in (130, 131, 300, 1000)
    ],
    "OneCycle": CYCLES,
    "LRRangeTest": RANGES,
}
# The one value of a curve that DeepSpeed takes from the optimizer.
FROM_THE_OPTIMIZER = {"WarmupCosineLR": {"lr": LR}}


def of_deepspeed(kind: str, arguments: dict[str, Any], start: int) -> Iterator[tuple[float, float]]:
    """Yield learning rate and momentum of each update, from a scheduler that continues after `start`."""
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=LR, betas=(0.5, 0.999))
    scheduler = getattr(lr_schedules, kind)(optimizer, **arguments)
    if start:
        scheduler.load_state_dict({"last_batch_iteration": start - 2})
        scheduler.step()
    (group,) = optimizer.param_groups
    for _ in range(STEPS):
        yield group["lr"], group["betas"][0]
        scheduler.step()


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_value_is_deepspeeds(kind, monkeypatch):
    # It warns before the first step of every warmup.
    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "disabled", True)
    for arguments, start in itertools.product(ARGUMENTS[kind], STARTS):
        curve = CURVES[kind](**arguments, **FROM_THE_OPTIMIZER.get(kind, {}))
        ours = [
            (curve.rate(update), curve.momentum(update) if curve.changes_momentum else 0.5)
            for update in range(start, start + STEPS)
        ]
        assert ours == [*of_deepspeed(kind, arguments, start)], (arguments, start)


def test_every_schedule_is_compared():
    assert set(ARGUMENTS) == set(ScheduleType.__args__)
    assert all(ARGUMENTS.values())


def test_paces_are_deepspeeds() -> None:
    from deepspeed.runtime.data_pipeline import curriculum_scheduler as scheduler

    for kind, degree in (("fixed_linear", 1), ("fixed_root", 2), ("fixed_root", 3)):
        for smallest, largest, iterations, multiple in ((8, 128, 37, 8), (5, 100, 90, 7), (3, 60, 11, 16)):
            schedule = fixed_root(
                smallest=smallest, largest=largest, iterations=iterations, multiple=multiple, degree=degree
            )
            settings = {"total_curriculum_step": iterations, "difficulty_step": multiple}
            theirs = scheduler.CurriculumScheduler(
                json.loads(json.dumps({
                    "min_difficulty": smallest, "max_difficulty": largest, "schedule_type": kind,
                    "schedule_config": settings | ({"root_degree": degree} if kind == "fixed_root" else {}),
                }))
            )  # fmt: skip
            assert [schedule(iteration) for iteration in range(150)] == [
                theirs.update_difficulty(iteration + 1) for iteration in range(150)
            ]
