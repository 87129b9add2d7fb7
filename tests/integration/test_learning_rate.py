"""The optimizer gets, and a run logs, what `neox-config schedule` prints."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from neox_config.derive.learning_rate import learning_rate_curve
from neox_config.facts.learning_rate import DECAY_STYLES, Curve
from neox_config.spec.schedule_preview import learning_rate
from neox_model.optim.lr_schedule import LearningRateSchedule
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

ITERATIONS = 20
SETTINGS: dict[str, Any] = SMALL_TRAINING | {
    "train_iters": ITERATIONS,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.87, 0.98]}},
    "log_interval": 1,
    "eval_interval": 1000,
    "save_interval": 1000,
}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def cycle(**params: Any) -> dict[str, Any]:
    lengths = {"cycle_first_step_size": 6, "cycle_second_step_size": 4, "decay_step_size": 3}
    rates = {"cycle_min_lr": 0.0005, "cycle_max_lr": 0.004, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}
    return scheduler("OneCycle", **lengths, **rates, **params)


# Name -> settings of a run with this curve.
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": scheduler("WarmupLR", warmup_num_steps=5),
    "WarmupDecayLR": scheduler("WarmupDecayLR", warmup_num_steps=5, warmup_min_lr=1e-4),
    "WarmupCosineLR": scheduler("WarmupCosineLR", warmup_num_steps=5, warmup_type="linear"),
    "OneCycle": cycle(),
    "OneCycle, momentum unchanged": cycle(cycle_momentum=False),
    "OneCycle, in stairs": cycle(cycle_first_stair_count=2),
    "wsd": {"lr_decay_style": "wsd", "min_lr": 4e-4, "lr_wsd_decay_iters": 6, "warmup_iters": 3},
    "wsd, 1-sqrt": {"lr_decay_style": "wsd", "lr_wsd_decay_style": "1-sqrt", "lr_wsd_decay_fraction": 0.5},
    "wsd, cosine": {"lr_decay_style": "wsd", "lr_wsd_decay_style": "cosine", "lr_decay_iters": 15},
    "wsd, repeated": {
        "lr_decay_style": "wsd",
        "lr_wsd_decays": [5, 12],
        "lr_wsd_decay_fraction": 0.4,
        "warmup_iters": 2,
        "min_lr": 4e-4,
    },
    "LRRangeTest": scheduler("LRRangeTest", lr_range_test_min_lr=1e-4, lr_range_test_step_size=4),
    "LRRangeTest, staircase": scheduler(
        "LRRangeTest",
        lr_range_test_min_lr=1e-4,
        lr_range_test_step_size=4,
        lr_range_test_staircase=True,
    ),
}
WARMUPS = [0.0, 0.01, 0.33, 1.0]
STYLES = {
    f"{style}, warmup {warmup}": {
        "lr_decay_style": style,
        "warmup": warmup,
        "min_lr": 4e-4,
        "lr_decay_iters": 17,
    }
    for style in DECAY_STYLES
    for warmup in WARMUPS
}
# The others train in `make sweep NAME=layouts`; all are compared with the optimizer, without a run.
TRAINED = (
    "WarmupDecayLR",
    "OneCycle",
    "OneCycle, momentum unchanged",
    "wsd",
    "LRRangeTest, staircase",
)
LAYOUTS = {
    "pipeline": {"pipe_parallel_size": 2},
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"precision": "fp16", "fp16": {"initial_scale_power": 4}},
    "ZeRO 1 in bf16": {"precision": "bfloat16", "zero_optimization": {"stage": 1}},
}


def curve_of(settings: dict[str, Any]) -> Curve:
    resolved = resolved_from(SETTINGS | settings)
    return learning_rate_curve(resolved.config, decay_iterations=resolved.update.decay_iterations)


@pytest.mark.parametrize("name", [*STYLES, *SCHEDULES])
def test_the_optimizer_gets_the_printed_rate_and_momentum_at_every_update(name):
    settings = (STYLES | SCHEDULES)[name]
    resolved, curve = resolved_from(SETTINGS | settings), curve_of(settings)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=9.0, betas=(0.87, 0.98))
    schedule = LearningRateSchedule(
        optimizer, learning_rate_curve(resolved.config, decay_iterations=resolved.update.decay_iterations)
    )
    used = []
    for _ in range(60):
        (group,) = optimizer.param_groups
        used.append((group["lr"], group["betas"]))
        schedule.step()
    momenta = [curve.momentum(update) if curve.changes_momentum else 0.87 for update in range(60)]
    assert used == [(learning_rate(resolved, update), (momenta[update], 0.98)) for update in range(60)]


def train_all(folder: str, runs: dict[str, dict[str, Any]]) -> None:
    """Train with each setting, one after another: without interruption, then stopped and resumed."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    for name, settings in runs.items():
        for part, more in (
            ("whole", {}),
            ("resumed", {"save": f"{folder}/{name}/saved", "exit_interval": 11}),
            ("resumed", {"save": f"{folder}/{name}/saved", "load": f"{folder}/{name}/saved"}),
        ):
            resolved = resolved_from(
                SETTINGS
                | settings
                | more
                | {"data_path": f"{folder}/corpus", "log_dir": f"{folder}/{name}/{part}"},
                devices=int(os.environ["WORLD_SIZE"]),
            )
            groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
            train_in(groups, resolved)


def logged(folder: Path, metric: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[metric] for line in lines if metric in line]


def train_all_in(folder: Path, schedules: Iterable[str], layouts: Mapping[str, dict[str, Any]]) -> Path:
    """Train with these schedules, and with one of them on these layouts."""
    write_corpus(folder)
    alone = {name: SCHEDULES[name] for name in schedules}
    run_ranks(train_all, size=1, folder=str(folder), runs=alone, timeout_seconds=300)
    parallel = {name: SCHEDULES["OneCycle"] | layout for name, layout in layouts.items()}
    run_ranks(train_all, size=2, folder=str(folder), runs=parallel, timeout_seconds=300)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_all_in(tmp_path_factory.mktemp("schedules"), TRAINED, LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["whole", "resumed"])
@pytest.mark.parametrize("name", [*TRAINED, *LAYOUTS])
def test_a_training_logs_exactly_the_values_of_the_curve(trained, name, part):
    curve = curve_of(SCHEDULES.get(name, SCHEDULES["OneCycle"]))
    rates = [curve.rate(update) for update in range(ITERATIONS)]
    assert logged(trained / name / part, "optimizer/learning_rate") == rates
    momenta = [curve.momentum(update) for update in range(ITERATIONS)] if curve.changes_momentum else []
    assert logged(trained / name / part, "optimizer/momentum") == momenta


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED, *LAYOUTS])
def test_a_resumed_training_is_the_uninterrupted_one(trained, name):
    for metric in ("loss/train", "optimizer/grad_norm"):
        whole, resumed = (logged(trained / name / part, metric) for part in ("whole", "resumed"))
        assert len(whole) == ITERATIONS
        assert resumed == whole


@pytest.mark.slow
def test_the_momentum_changes_the_training(trained):
    cycled, constant = (
        logged(trained / name / "whole", "loss/train")
        for name in ("OneCycle", "OneCycle, momentum unchanged")
    )
    assert cycled[:2] == constant[:2]
    assert cycled[2] != constant[2]


@pytest.mark.sweep
def test_every_other_schedule_is_logged_exactly_and_resumes(tmp_path):
    others = SCHEDULES.keys() - TRAINED
    folder = train_all_in(tmp_path, others, {})
    for name in others:
        for part in ("whole", "resumed"):
            test_a_training_logs_exactly_the_values_of_the_curve(folder, name, part)
        test_a_resumed_training_is_the_uninterrupted_one(folder, name)
