"""ZeRO in pipelines of the torch engine trains what the same pipeline trains without it.

`tests/integration/test_layouts.py` compares both with one process, for every architecture, and
`tests/integration/test_pipeline_zero.py` exchanges their checkpoints.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from support.distributed import run_ranks

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"engine": "torch"},
    "interleaved": {"pipeline_schedule": "interleaved"},
    "zero_bubble": {"pipeline_schedule": "zero_bubble"},
    "zero_bubble, 2 chunks": {"pipeline_schedule": "zero_bubble", "virtual_pipeline_stages": 2},
    "zbv": {"pipeline_schedule": "zbv"},
}
CASES = [
    (name, stage)
    for name in SCHEDULES
    for stage in (1, 2, 3)
    # Refused: see the rule split_backward_passes_keep_weights.
    if stage < 3 or name in ("1f1b", "interleaved")
]
# Sums in another order. In 16 bit, messages round the mean of an update's gradients (stage 1), or of each
# micro-batch's, once more: relative to the update.
TOLERANCES = {"fp32": 2e-6, "bf16": 2 * 2.0**-8, "fp16": 2 * 2.0**-11}
UPDATES = {"fp32": 3, "bf16": 1, "fp16": 1}
TIED = "embedding.word_embeddings.weight"

# Losses, and runs of masters and states: name -> first element, change or value.
Trained = tuple[list[float], dict[str, tuple[int, Tensor]]]


def settings_of(**more: Any) -> dict[str, Any]:
    from support.layouts import SETTINGS, SMALL

    small = SMALL | {"num_layers": 4, "train_micro_batch_size_per_gpu": 1}
    return SETTINGS | small | {"pipe_parallel_size": 2} | more


def trained(*, updates: int, **more: Any) -> Trained:
    """Train two stages of two replicas; runs in every rank."""
    from neox_model.checkpoint.logical import engine_fragments
    from support import layouts
    from support.settings import resolved_from
    from support.worlds import forget_deepspeeds_world

    forget_deepspeeds_world()
    resolved = resolved_from(settings_of(**more), devices=torch.distributed.get_world_size())
    engine, step, groups, _ = layouts.start(resolved)
    fragments = engine_fragments(engine)
    before = [fragment.weight.clone() for fragment in fragments]
    batches = layouts.batches_of(resolved, groups)
    losses = [float(step(batches).loss) for _ in range(updates)]
    runs: dict[str, tuple[int, Tensor]] = {}
    for fragment, old in zip(fragments, before, strict=True):
        assert fragment.weight.dtype == torch.float32
        runs[fragment.name] = fragment.held.start, fragment.weight - old
        holder = fragment.held.holder
        # A fault may leave a weight without a gradient.
        momentum = engine.update.optimizer.state[holder].get("momentum_buffer", torch.zeros_like(holder))
        runs[f"{fragment.name}, momentum"] = fragment.held.start, fragment.part_of(momentum).clone()
    return losses, runs


def difference(found: Trained, expected: Trained, *, is_relative: bool) -> dict[str, float]:
    """The largest difference of a loss and of an element, or that of a run, relative to the whole tensor."""
    pairs = zip(found[0], expected[0], strict=True)
    apart = {"loss": max(abs(one - other) for one, other in pairs)}
    for name, (start, values) in found[1].items():
        whole = expected[1][name][1]
        errors = values - whole[start : start + len(values)]
        apart[name] = float(errors.norm() / whole.norm()) if is_relative else float(errors.abs().max())
    return apart


def compare(precision: str) -> dict[str, dict[str, float]]:
    """Each case with stage 0; runs in every rank."""
    found, updates = {}, UPDATES[precision]
    for name, schedule in SCHEDULES.items():
        settings = PRECISIONS[precision] | schedule
        plain = trained(updates=updates, **settings)
        for each, stage in CASES:
            if each == name:
                other = trained(updates=updates, **settings, zero_optimization={"stage": stage})
                assert sum(values.numel() for _, values in other[1].values()) < 0.6 * sum(
                    values.numel() for _, values in plain[1].values()
                )
                found[f"{name}, stage {stage}"] = difference(other, plain, is_relative=precision != "fp32")
    return found


# `tests/integration/test_layouts.py` compares these stages in float32 with one process.
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(each, marks=pytest.mark.slow if each == "bf16" else pytest.mark.sweep)
        for each in PRECISIONS
    ],
)
def test_every_stage_trains_what_stage_0_trains(precision):
    results = run_ranks(compare, size=4, precision=precision, timeout_seconds=600)
    for found in results:
        assert len(found) == len(CASES)
        wrong = {
            f"{case}: {name}": value
            for case, differences in found.items()
            for name, value in differences.items()
            if not value <= TOLERANCES[precision]
        }
        assert not wrong
    names = {name for found in results for differences in found.values() for name in differences}
    assert {TIED, "layers.3.mlp.up.weight, momentum", "final_norm.bias"} <= names


Fault = Callable[[], AbstractContextManager[Any]]


def _replaces(path: str, name: str, make: Callable[[Any], Any]) -> Fault:
    """Replace an attribute of a class by what `make` gives for it."""

    def plant() -> AbstractContextManager[Any]:
        from importlib import import_module

        module, _, owner = path.rpartition(".")
        cls = getattr(import_module(module), owner)
        return patch.object(cls, name, make(getattr(cls, name)))

    return plant


def _own_part(original: Any) -> Any:
    def call(reduction: Any, *, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    return call


def _twice(original: Any) -> Any:
    def call(reduction: Any, *, input_tensor: Tensor, group: Any, **others: Any) -> None:
        torch.distributed.all_reduce(input_tensor, group=group)
        original(reduction, input_tensor=input_tensor, group=group, **others)

    return call


def _by_own_norm(original: Any) -> Any:
    def init(update: Any, *arguments: Any, **named: Any) -> None:
        original(update, *arguments, **named | {"is_sharded": False})

    return init


def _losing_gradients(original: Any) -> Any:
    def collect(stage: Any) -> None:
        for parameter in stage.model.parameters():
            parameter.grad = None

    return collect


def _keeping_weights(original: Any) -> Any:
    def end_passes(stage: Any) -> None:
        root = stage._parts[0]
        free, root.set_reshard_after_backward = root.set_reshard_after_backward, lambda *_, **__: None
        root.set_reshard_after_backward(False)
        try:
            original(stage)
        finally:
            root.set_reshard_after_backward = free

    return end_passes


_REDUCTION = "neox_model.parallel.sharding.MeanReduceScatter"
_STAGE = "neox_model.parallel.sharded_stage.ShardedStage"
_MIXED = "neox_model.optim.mixed_precision.MixedPrecisionOptimizer"
_STAGED = "neox_model.assembly.as_stages.StagedModel"
FAULTS: dict[str, tuple[Fault, dict[str, Any]]] = {
    "no reduction": (_replaces(_REDUCTION, "__call__", _own_part), SCHEDULES["1f1b"]),
    "reduction twice": (
        _replaces(_REDUCTION, "__call__", _twice),
        # Clipping would undo it.
        SCHEDULES["interleaved"] | {"gradient_clipping": 0.0},
    ),
    "clipping by the norm of the rank's part": (
        _replaces(_MIXED, "__init__", _by_own_norm),
        SCHEDULES["1f1b"],
    ),
    "tied gradients are not summed": (
        _replaces(_STAGED, "take_over_ties", lambda _: lambda model: []),
        SCHEDULES["interleaved"],
    ),
    "gradients of weights of a micro-batch are lost": (
        _replaces(_STAGE, "collect", _losing_gradients),
        SCHEDULES["zero_bubble"],
    ),
    "weights stay from one update to the next": (
        _replaces(_STAGE, "end_passes", _keeping_weights),
        SCHEDULES["1f1b"],
    ),
}


def plant_each() -> dict[str, float]:
    found = {}
    for name, (fault, schedule) in {"none": (nullcontext, SCHEDULES["zbv"]), **FAULTS}.items():
        plain = trained(updates=2, **schedule)
        with fault():
            wrong = trained(updates=2, **schedule, zero_optimization={"stage": 1})
        found[name] = max(difference(wrong, plain, is_relative=False).values())
    return found


@pytest.mark.slow
def test_each_planted_fault_is_found():
    results = run_ranks(plant_each, size=4, timeout_seconds=300)
    worst = {name: max(found[name] for found in results) for name in results[0]}
    assert worst.pop("none") <= TOLERANCES["fp32"]
    assert worst.keys() == FAULTS.keys()
    for name, value in worst.items():
        assert value > 100 * TOLERANCES["fp32"], name


def test_programs_without_an_optimizer_keep_the_engine_that_zero_chose():
    from neox_model.assembly.zero_sharding import without_zero
    from support.settings import resolved_from

    resolved = resolved_from({"pipe_parallel_size": 2, "zero_optimization": {"stage": 2}}, devices=4)
    plain = without_zero(resolved.run)
    assert plain.layout.zero == 0
    assert plain.engine == resolved.run.engine


def losses_between_updates(stage: int, schedule: str) -> list[float]:
    """Losses of one batch after each change of the weights; runs in every rank."""
    from support import layouts
    from support.settings import resolved_from

    settings = settings_of(**SCHEDULES[schedule], zero_optimization={"stage": stage})
    resolved = resolved_from(settings, devices=torch.distributed.get_world_size())
    engine, step, groups, _ = layouts.start(resolved)
    batches_again = partial(layouts.batches_of, resolved, groups)
    loss = partial(_loss_of, step, batches_again, resolved.run.batch.accumulation)
    batches = layouts.batches_of(resolved, groups)
    found = [loss(), loss()]
    found.append(float(step(batches).loss))
    found.append(loss())
    with torch.no_grad():
        for held in engine.update.param_shards():
            held.holder.zero_()
    engine.update.to_model()
    return [*found, loss()]


def _loss_of(step: Any, batches: Callable[[], Any], count: int) -> float:
    return float(step.evaluate(batches(), count))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "schedule"), [(1, "zbv"), (3, "interleaved")])
def test_evaluations_use_the_weights_of_the_moment(stage, schedule):
    results = run_ranks(losses_between_updates, size=4, stage=stage, schedule=schedule)
    for first, again, train, after, without in results:
        assert first == again == pytest.approx(train, abs=1e-6)
        assert after < first - 1e-3
        # Without weights every token is as probable as the others.
        assert without == pytest.approx(torch.tensor(11.0).log().item(), abs=1e-4)
