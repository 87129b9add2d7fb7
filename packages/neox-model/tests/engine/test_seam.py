"""The seam before the update: where it is offered, and the norms of whole tensors that it shows."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neox_config.facts.engines import ENGINES
from neox_model.engine.contract import PendingUpdate
from support import layouts
from support.distributed import run_ranks
from support.layouts import LAYOUTS, SETTINGS, SMALL
from support.read_backs import ReadBacks
from support.settings import resolved_from
from support.worlds import forget_deepspeeds_world

NAMES = ("tensor 2", "pipeline 2", "data 2", "torch, ZeRO 1", "torch, ZeRO 3")
WEIGHT = "layers.0.attention.qkv.weight"


def norms_of(settings: dict[str, Any]) -> dict[str, float]:
    """Return what the seam shows of this stage's first update: tensors by name, and "all" gradients."""
    forget_deepspeeds_world()
    resolved = resolved_from(SETTINGS | SMALL | settings, devices=dist.get_world_size())
    started = layouts.start(resolved)
    seen: list[dict[str, torch.Tensor]] = []

    def look(pending: PendingUpdate) -> None:
        with ReadBacks() as reads:
            seen.append({"all": pending.norm, **pending.tensor_norms()})
        assert reads.count == 0

    started.engine.update.before(look)
    report = started.step(layouts.batches_of(resolved, started.groups))
    (norms,) = seen
    # The gradients are not clipped yet.
    assert float(norms["all"]) == float(report.grad_norm) > resolved.config.optimizer.gradient_clipping
    return {name: float(norm) for name, norm in norms.items()}


def norms_in_every_precision() -> dict[str, dict[str, float]]:
    """Run in one rank."""
    return {precision: norms_of({"precision": precision}) for precision in ("fp32", "bfloat16", "fp16")}


def norms_on_every_layout() -> dict[str, dict[str, float]]:
    """Run in every rank."""
    return {name: norms_of(LAYOUTS[name].settings) for name in NAMES}


def plain_norms() -> dict[str, float]:
    """Return the norms of autograd's gradients, without an engine; runs in one rank."""
    from neox_model.assembly.model import build_model
    from neox_model.parallel.logical import named_logical_parameters
    from neox_model.parallel.topology import create_groups
    from neox_model.train.data.batch import weighted_by_micro_batch

    resolved = resolved_from(SETTINGS | SMALL)
    groups = create_groups(1, 0)
    model = build_model(resolved.model, resolved.run, groups, vocab_size=layouts.VOCAB)
    batches = layouts.batches_of(resolved, groups)
    for _ in range(resolved.run.batch.accumulation):
        (batch,) = weighted_by_micro_batch(batches, 1, torch.device("cpu"))
        (model(batch.inputs, batch.targets) / resolved.run.batch.accumulation).backward()
    return {name: float(parameter.grad.norm()) for name, parameter in named_logical_parameters(model)}


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    (found,) = run_ranks(plain_norms, size=1)
    assert found[WEIGHT] > 0.01
    return found | {"all": sum(norm**2 for norm in found.values()) ** 0.5}


def test_the_norms_are_those_of_the_gradients_in_every_precision(plain):
    (found,) = run_ranks(norms_in_every_precision, size=1)
    assert found["fp32"] == pytest.approx(plain, rel=1e-4, abs=1e-6)
    for precision in ("bfloat16", "fp16"):
        assert found[precision] == pytest.approx(plain, rel=0.05, abs=1e-3), precision


def test_every_layout_shows_the_norms_of_whole_tensors(plain):
    first, second = run_ranks(norms_on_every_layout, size=2)
    for name in NAMES:
        # Ranks of a pipeline show the tensors of their stages, a tied one only its owner; others show all.
        shared = first[name].keys() & second[name].keys()
        assert shared == ({"all"} if name == "pipeline 2" else plain.keys()), name
        for norms in (first[name], second[name]):
            expected = {key: plain[key] for key in norms}
            assert norms == pytest.approx(expected, rel=1e-4, abs=1e-6), name
        assert first[name].keys() | second[name].keys() == plain.keys(), name


def capabilities() -> dict[str, list[bool]]:
    """Engine, ZeRO stage and pipeline -> whether it offers the seam, and updates whole weights or rows."""
    from neox_model.errors import ModelError

    found = {}
    for engine, stage, pipeline in product(ENGINES, range(4), (0, 1)):
        if not ENGINES[engine]["training"].includes(stage, uses_pipeline=bool(pipeline)):
            continue
        forget_deepspeeds_world()
        settings = {"engine": engine, "pipe_parallel_size": pipeline, "zero_optimization": {"stage": stage}}
        resolved = resolved_from(SETTINGS | SMALL | settings, devices=dist.get_world_size())
        update = layouts.start(resolved).engine.update
        refused = ""
        try:
            update.before(lambda pending: None)
        except ModelError as error:
            refused = str(error)
        assert "set zero_optimization.stage: 0" in refused or not refused
        shapes = [(tuple(held.holder.shape), held.local_shape) for held in update.param_shards()]
        is_whole = all(own == local for own, local in shapes)
        has_rows = all(len(own) == len(local) and own[1:] == local[1:] for own, local in shapes)
        found[f"{engine} {stage} {pipeline}"] = [not refused, is_whole, has_rows]
    return found


def test_the_table_of_engines_says_what_each_offers():
    found, other = run_ranks(capabilities, size=2)
    assert found == other
    assert len(found) == 14
    for key, offered in found.items():
        engine, stage, pipeline = key.split()
        named = [
            ENGINES[engine][capability].includes(int(stage), uses_pipeline=pipeline == "1")
            for capability in ("before_update", "whole_weights", "whole_rows")
        ]
        assert offered == named, key
