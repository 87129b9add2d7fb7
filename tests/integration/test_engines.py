"""The torch engine and DeepSpeed's train the same model; at ZeRO stage 0, to the last bit."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.distributed import run_ranks

# Sums in another order; messages in 16 bit are rounded once more or less.
TOLERANCES = {"fp32": 2e-6, "bfloat16": 6e-3, "fp16": 1e-3}
ALL: dict[str, dict[str, Any]] = {
    f"ZeRO {stage}, {precision}": {
        "precision": precision,
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 2,
        "fp16": {"initial_scale_power": 8},
    }
    for stage in range(4)
    for precision in TOLERANCES
} | {"ZeRO 0, tensor parallel": {"model_parallel_size": 2}}
# Of the stages that partition, each in bfloat16 and one in each other precision.
PARTITIONED = {"ZeRO 1, fp16", "ZeRO 3, fp32", *(f"ZeRO {stage}, bfloat16" for stage in (1, 2, 3))}
CASES = {name: case for name, case in ALL.items() if name.startswith("ZeRO 0") or name in PARTITIONED}


def train_on_both(cases: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return the largest difference of a loss and of a weight, by case; runs in two processes."""
    from support.layouts import Layout, settings_of, train
    from support.settings import resolved_from
    from support.worlds import forget_deepspeeds_world

    found = {}
    for name, case in cases.items():
        runs = []
        for engine in ("torch", "deepspeed"):
            forget_deepspeeds_world()
            settings = settings_of("half rotary, parallel residual, untied", Layout(2, case), recomputes=True)
            resolved = resolved_from({**settings, "engine": engine}, devices=dist.get_world_size())
            runs.append(train(resolved, iterations=6)[0])
        one, other = runs
        assert one.losses[-1] < one.losses[0] - 0.1
        losses = [abs(mine - theirs) for mine, theirs in zip(one.losses, other.losses, strict=True)]
        weights = [
            float((weight.float() - other.weights[path].float()).abs().max())
            for path, weight in one.weights.items()
        ]
        found[name] = [max(losses), max(weights)]
    return found


def check(cases: dict[str, dict[str, Any]]) -> None:
    for found in run_ranks(train_on_both, size=2, cases=cases, timeout_seconds=600):
        assert found.keys() == cases.keys()
        for name, (loss, weight) in found.items():
            limit = 0.0 if name.startswith("ZeRO 0") else TOLERANCES[cases[name]["precision"]]
            assert max(loss, weight) <= limit, f"{name}: {loss} {weight}"


@pytest.mark.slow
def test_both_engines_train_the_same_model():
    check(CASES)


@pytest.mark.sweep
def test_both_engines_train_the_same_model_in_every_precision_at_every_stage():
    check(ALL)


@pytest.mark.slow
def test_the_torch_engine_does_not_import_deepspeed():
    program = (
        "import sys, neox_model.train.open_run, neox_model.engine.torch_engine, neox_model.assembly.model;"
        "sys.exit('deepspeed' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def evaluate_between_updates(stage: int) -> list[float]:
    """Return losses of one batch after each change of the weights; runs in two processes."""
    from support import layouts
    from support.settings import resolved_from

    settings = layouts.SETTINGS | layouts.SMALL | {"engine": "torch", "zero_optimization": {"stage": stage}}
    resolved = resolved_from(settings, devices=dist.get_world_size())
    engine, step, groups, _ = layouts.start(resolved)
    count = resolved.run.batch.accumulation

    def loss() -> float:
        return float(step.evaluate(layouts.batches_of(resolved, groups), count))

    batches = layouts.batches_of(resolved, groups)
    found = [loss(), loss()]
    found.append(float(step(batches).loss))
    found.append(loss())
    with torch.no_grad():
        for held in engine.update.param_shards():
            held.holder.zero_()
    engine.update.to_model()
    return [*found, loss()]


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluations_use_the_weights_of_the_moment(stage):
    for first, again, trained, after, without in run_ranks(evaluate_between_updates, size=2, stage=stage):
        assert first == again == pytest.approx(trained, abs=1e-6)
        assert after < first - 1e-3
        # Without weights every token is as probable as the others.
        assert without == pytest.approx(torch.tensor(11.0).log().item(), abs=1e-4)
