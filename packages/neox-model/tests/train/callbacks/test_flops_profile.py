"""Counted operations of a training iteration against the formula, on plain and pipeline engines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neox_config.estimate import count_parameters, flops_per_token
from neox_config.schema.sections.engine import FlopsProfiler
from neox_config.spec.model import ModelSpec
from neox_model.train.callbacks.flops_profile import FlopsCallback
from neox_model.train.loop import Loop
from neox_model.train.state import StepReport, TrainState
from support import layouts
from support.distributed import run_ranks
from support.layouts import LAYOUTS, SETTINGS, SMALL
from support.refusals import shows
from support.runs import a_run, count
from support.settings import resolved_from
from support.worlds import forget_deepspeeds_world

# Twelve entries, so that tensor-parallel ranks pad none.
COMMON: dict[str, Any] = SETTINGS | SMALL | {"make_vocab_size_divisible_by": 12}
RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 2}
CASES: dict[str, dict[str, Any]] = {
    "data 2": LAYOUTS["data 2"].settings | {"precision": "bfloat16"},
    "tensor 2": LAYOUTS["tensor 2"].settings,
    "pipeline 2": LAYOUTS["pipeline 2"].settings,
    "pipeline 2, recomputed, fp16": LAYOUTS["pipeline 2"].settings | RECOMPUTED | {"precision": "fp16"},
    "data 2, recomputed, untied, ZeRO 3": LAYOUTS["data 2"].settings
    | RECOMPUTED
    | {"no_weight_tying": True, "zero_optimization": {"stage": 3}},
}
PROFILED, ITERATIONS = 2, 3


def profile(folder: str) -> dict[str, dict[str, Any]]:
    """Return what this rank's profile of each case holds; runs in every rank."""
    from neox_model.metrics.flops import FlopProfile, count_flops
    from neox_model.train.callbacks import flops_profile

    profiles: list[FlopProfile] = []
    found: dict[str, dict[str, Any]] = {}

    @contextmanager
    def recorded(*arguments: Any, **named: Any) -> Iterator[FlopProfile]:
        with count_flops(*arguments, **named) as profile:
            yield profile
        profiles.append(profile)

    flops_profile.count_flops = recorded
    for name, settings in CASES.items():
        forget_deepspeeds_world()
        path = Path(folder, name) / "profile.txt"
        block = {"enabled": True, "profile_step": PROFILED, "output_file": str(path)}
        resolved = resolved_from(COMMON | settings | {"flops_profiler": block}, devices=dist.get_world_size())
        started = layouts.start(resolved)
        callback = flops_profile.FlopsCallback(
            resolved.config.engine.flops_profiler, formula=lambda tokens: 1000
        )
        run = a_run(
            callback,
            state=TrainState(last_iteration=ITERATIONS, samples_per_iteration=layouts.SAMPLES),
            groups=started.groups,
            engine=started.engine,
            step=started.step,
        )
        batches = layouts.batches_of(resolved, started.groups)
        accumulation = resolved.run.batch.accumulation
        loop = Loop(run, batches)
        for _ in range(ITERATIONS):
            started.step.evaluate(batches, accumulation)
            loop.run(1)
        seen = profiles.pop()
        assert not profiles
        found[name] = {
            "flops": seen.flops,
            "forward": seen.forward,
            "recomputed": seen.recomputed,
            "parameters": seen.modules[0].parameters,
            "layers": sum(each.flops for each in seen.modules if each.kind == "TransformerLayer"),
            "report": path.read_text() if dist.get_rank() == 0 else "",
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(profile, size=2, folder=str(tmp_path_factory.mktemp("flops")))


def model_and_tokens(name: str) -> tuple[ModelSpec, int]:
    resolved = resolved_from(COMMON | CASES[name], devices=2)
    return resolved.model, layouts.SAMPLES * resolved.run.batch.length


def flops(model: ModelSpec, *, is_recomputed: bool = False) -> int:
    entries = model.embedding.entries(layouts.VOCAB)
    length = model.max_positions
    return flops_per_token(model, entries=entries, length=length, is_recomputed=is_recomputed)


def expected(name: str) -> int:
    """Return the formula's operations, and Q K^T, which attention computes again in the backward pass."""
    model, tokens = model_and_tokens(name)
    scores = 2 * model.max_positions * model.width * len(model.layers)
    formula = flops(model, is_recomputed="recomputed" in name)
    return tokens * (formula + scores) - not_recomputed(name)


def not_recomputed(name: str) -> int:
    """Return the operations of the last product of each segment, the MLP's second matrix.

    PyTorch ends the recomputation before it, because nothing needs its output.
    """
    model, tokens = model_and_tokens(name)
    segments = 3 if "recomputed" in name else 0
    return segments * tokens * 2 * 4 * model.width**2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_ranks_together_compute_what_the_formula_gives(found, name):
    counts = [rank[name]["flops"] for rank in found]
    assert sum(counts) == expected(name)
    if "pipeline" not in name:
        assert counts[0] == counts[1]
    head, *_ = found[0][name]["report"].splitlines()
    assert head.startswith(f"FLOPs of iteration {PROFILED}: {sum(counts):,} on 2 ranks; ")


@pytest.mark.parametrize("name", CASES)
def test_the_layers_forward_passes_are_a_third_of_their_share_in_the_formula(found, name):
    model, tokens = model_and_tokens(name)
    layers = tokens * (flops(model, is_recomputed=True) - flops(model))
    recomputed = sum(rank[name]["recomputed"] for rank in found)
    assert sum(rank[name]["layers"] for rank in found) == layers + recomputed
    assert recomputed == (layers - not_recomputed(name) if "recomputed" in name else 0)


def test_a_stage_has_its_share_of_the_layers(found):
    model, tokens = model_and_tokens("pipeline 2")
    first, last = (rank["pipeline 2"] for rank in found)
    # The first stage has two of the five layers; the head is on the last one, outside of any module.
    assert 3 * first["layers"] == 2 * last["layers"]
    head = tokens * 3 * 2 * 12 * model.width
    assert 2 * (last["flops"] - head) == 3 * first["flops"]
    report = first["report"]
    assert report.index("stage 0, rank 0:") < report.index("stage 1, rank 1:")
    assert f"{last['flops']:,} FLOPs in " in report


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_that_a_rank_computes_with(found, name):
    model, _ = model_and_tokens(name)
    ranks = [rank[name]["parameters"] for rank in found]
    whole = sum(count_parameters(model, model.embedding.entries(layouts.VOCAB)).values())
    tied = 12 * model.width
    if name.startswith("data"):
        assert ranks == [whole, whole]
    if name.startswith("pipeline"):
        assert sum(ranks) == whole + tied


class OneProduct:
    """An engine and a step that computes one product of 4 operations."""

    def __init__(self) -> None:
        self.model, self.device = torch.nn.Linear(2, 1, bias=False), torch.device("cpu")

    def __call__(self, batches: Iterator[Any]) -> StepReport:
        self.model(torch.ones(1, 2))
        return StepReport(loss=None, grad_norm=None, skipped=False, tokens=8)


def logged(caplog, *, start: int, output_file: Path | None = None) -> str:
    """Return what is logged about five iterations after `start`."""
    section = FlopsProfiler(enabled=True, profile_step=3, output_file=output_file and str(output_file))
    callback = FlopsCallback(section, formula=lambda tokens: tokens)
    computed = OneProduct()
    with caplog.at_level(logging.INFO, logger="neox_model"):
        count(callback, last=start + 5, iteration=start, engine=computed, step=computed)
    return caplog.text


@pytest.mark.parametrize("start", [0, 2])
def test_one_iteration_is_logged_and_compared_with_the_formula(caplog, start):
    text = logged(caplog, start=start)
    assert text.count("FLOPs of iteration") == 1
    head = "FLOPs of iteration 3: 4 on 1 rank; the formula gives 8 (counted / formula: 0.5000)"
    assert head in text
    assert shows(text, "stage 0", "rank 0")


@pytest.mark.parametrize("start", [3, 7])
def test_a_training_that_resumes_after_the_iteration_profiles_none(caplog, start):
    assert logged(caplog, start=start) == ""


def test_the_report_goes_to_the_file(caplog, tmp_path):
    path = tmp_path / "new" / "profile.txt"
    assert "stage 0" not in logged(caplog, start=0, output_file=path)
    assert shows(path.read_text(), "stage 0", "rank 0")
    assert [each.name for each in path.parent.iterdir()] == ["profile.txt"]


def test_a_report_that_cannot_be_written_does_not_end_the_training(caplog, tmp_path):
    (tmp_path / "file").touch()
    text = logged(caplog, start=0, output_file=tmp_path / "file" / "profile.txt")
    assert shows(text, "FLOPs", "not written", "continues")
