"""Settings of the reduction of gradients, seen in what is handed to collectives and in the updated weights.

Every rank has a known gradient, so that the rounding of the messages, and the order of sum and division, can
be computed: 1 on the first rank, and 2^-9 + 2^-12 on the second. Their sum keeps both small terms in float32,
the first of them in float16, and none in bfloat16.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.distributed import run_ranks

pytestmark = pytest.mark.slow

SMALL = 2.0**-9 + 2.0**-12
SUMS = {"fp32": 1 + SMALL, "fp16": 1 + 2.0**-9, "bf16": 1.0}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
WIDTH = 16
TRAINING = {"fp32": "fp32", "bf16": "bfloat16", "fp16": "fp16"}
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter")

ENGINES = ("torch", "deepspeed")
DTYPES: dict[str, dict[str, Any]] = {
    f"{engine}, ZeRO {stage}, {precision}, {message}": {
        "engine": engine,
        "zero_optimization": {"stage": stage},
        "precision": TRAINING[precision],
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": message,
    }
    for engine in ENGINES
    for stage in range(4)
    for precision in TRAINING
    for message in (None, "fp32", "fp16", "bf16")
}
WITHOUT_SCATTER = {"reduce_scatter": False}
SCALES: dict[str, dict[str, Any]] = {
    f"{engine}, ZeRO {stage}, {name}": {
        "engine": engine,
        "zero_optimization": {"stage": stage, **WITHOUT_SCATTER},
        **settings,
    }
    for engine in ENGINES
    for stage in range(4)
    for name, settings in {
        "sum, then division": {},
        "prescale": {"prescale_gradients": True},
        "predivide by 4": {"gradient_predivide_factor": 4.0},
        "predivide by 2": {"gradient_predivide_factor": 2.0},
    }.items()
    # A rule refuses the factor with stage 3.
    if stage < 3 or not name.startswith("predivide")
}
CAST: dict[str, dict[str, Any]] = {
    f"{engine}, ZeRO {stage}, auto_cast": {
        "engine": engine,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "loss_scale": 1.0, "auto_cast": True},
    }
    for engine in ENGINES
    for stage in range(4)
}


class Toy(torch.nn.Module):
    """Has the given gradient in every weight."""

    def __init__(self, gradient: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH))
        self.gradient = gradient
        self.masks: set[str] = set()

    def forward(self, tokens: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self.masks.add(str(targets[1].dtype))
        return (self.weight * self.gradient).sum()


@contextmanager
def watched_messages(seen: list[Any], *, at_least: int = WIDTH) -> Iterator[None]:
    """Collect dtype and first element of what is handed to a reduction, from a number of elements on."""
    from neox_model.parallel import sharding

    usual: dict[tuple[Any, str], Any] = {
        (dist, name): getattr(dist, name) for name in REDUCTIONS if hasattr(dist, name)
    }
    usual[sharding, "reduce_scatter_single"] = sharding.reduce_scatter_single

    def watching(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            given = [*arguments, *options.values()]
            flat = [each for item in given for each in (item if isinstance(item, list) else [item])]
            tensors = [each for each in flat if isinstance(each, torch.Tensor)]
            sent = max(tensors, key=lambda each: each.numel())
            if sent.is_floating_point() and sent.numel() >= at_least:
                seen.append([NAMES[sent.dtype], float(sent.flatten()[0])])
            return function(*arguments, **options)

        return call

    for (module, name), function in usual.items():
        setattr(module, name, watching(function))
    try:
        yield
    finally:
        for (module, name), function in usual.items():
            setattr(module, name, function)


def reduce_each(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Make one update with SGD for each case; the messages, and the updated weight with its sign changed."""
    from neox_config.facts.learning_rate import WarmupThenDecay
    from neox_model.engine.build import build_engine, prepare_engine
    from neox_model.optim.lr_schedule import LearningRateSchedule
    from neox_model.parallel.topology import create_groups
    from neox_model.train.data.batch import as_batch
    from neox_model.train.step import EngineStep
    from support.settings import resolved_from

    groups = create_groups(1, 1)
    prepare_engine(resolved_from({"engine": "deepspeed"}).run)
    found = {}
    for name, case in cases.items():
        settings = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0, "fp16": {"loss_scale": 1.0}}
        resolved = resolved_from(settings | case, devices=int(os.environ["WORLD_SIZE"]))
        model = Toy(1.0 if groups.data.rank == 0 else SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        curve = WarmupThenDecay(style="constant", peak=1.0, floor=0.0, warmup=0.0, decay_iterations=9)
        schedule = LearningRateSchedule(optimizer, curve)
        engine = build_engine(resolved.run, resolved.update, model, optimizer, schedule, groups=groups)
        seen: list[Any] = []
        with watched_messages(seen):
            EngineStep(engine, accumulation=1)(iter([as_batch(torch.tensor([[1, 2, 3]]))]))
        masters = [float(-held.holder.flatten()[held.offset]) for held in engine.update.param_shards()]
        found[name] = {"sent": seen, "mean": masters, "masks": sorted(model.masks)}
    return found


def reduce_all() -> dict[str, Any]:
    """Run all cases in the same processes, because starting them takes longer."""
    return reduce_each(DTYPES | SCALES | CAST) | {"pipelines": reduce_in_pipelines(PIPELINES)}


@pytest.fixture(scope="module")
def reduced() -> list[dict[str, Any]]:
    return run_ranks(reduce_all, size=2)


def default_message(case: dict[str, Any], precision: str) -> str:
    """Return the default dtype of messages: that of accumulation, or under ZeRO that of training."""
    return "fp32" if case["zero_optimization"]["stage"] == 0 else precision


@pytest.mark.parametrize("name", DTYPES)
def test_the_mean_has_the_rounding_of_the_messages(reduced, name):
    case = DTYPES[name]
    precision = name.split(", ")[2]
    message = case["communication_data_type"] or default_message(case, precision)
    for rank in reduced:
        assert set(rank[name]["mean"]) <= {SUMS[message] / 2}
        # DeepSpeed looks up the function of stage 3 before it can be watched.
        if case["zero_optimization"]["stage"] < 3 or case["engine"] == "torch":
            assert [dtype for dtype, _ in rank[name]["sent"]] == [message]
    assert any(rank[name]["mean"] for rank in reduced)


# What a rank sends of a gradient of 1.
SENT = {"sum, then division": 1.0, "prescale": 0.5, "predivide by 4": 0.25, "predivide by 2": 0.5}


@pytest.mark.parametrize("name", SCALES)
def test_gradients_are_divided_where_the_settings_say_and_the_result_is_their_mean(reduced, name):
    _, stage, kind = name.split(", ", maxsplit=2)
    # Stage 3 always divides first.
    expected = 0.5 if stage == "ZeRO 3" else SENT[kind]
    for rank, gradient in enumerate((1.0, SMALL)):
        assert reduced[rank][name]["sent"] == [["fp32", expected * gradient]]
        assert set(reduced[rank][name]["mean"]) <= {SUMS["fp32"] / 2}


def test_cast_inputs_are_no_inputs_of_the_model(reduced):
    """DeepSpeed would round the weights of tokens in the loss, too."""
    for rank in reduced:
        for name in CAST:
            assert rank[name]["masks"] == ["torch.float32"]


PIPELINES: dict[str, dict[str, Any]] = {
    f"ZeRO {stage}, {precision}, {message}": {
        "zero_optimization": {"stage": stage},
        "precision": TRAINING[precision],
        "communication_data_type": message,
    }
    for stage in range(2)
    for precision in ("fp32", "bf16")
    for message in (None, "fp32", "fp16")
} | {
    f"ZeRO {stage}, fp32, prescale": {
        "zero_optimization": {"stage": stage, **WITHOUT_SCATTER},
        "prescale_gradients": True,
    }
    for stage in range(2)
}
# Smaller messages are losses and norms.
_WEIGHTS = 500


def reduce_in_pipelines(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train each case for one update in DeepSpeed's pipeline; the messages with gradients."""
    from support.layouts import SMALL as SIZES
    from support.layouts import batches_of, start
    from support.settings import resolved_from

    found = {}
    for name, case in cases.items():
        settings = SIZES | {"engine": "deepspeed", "pipe_parallel_size": 1, "train_batch_size": 8} | case
        settings |= {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}
        resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
        _, step, groups, _ = start(resolved)
        seen: list[Any] = []
        with watched_messages(seen, at_least=_WEIGHTS):
            step(batches_of(resolved, groups))
        found[name] = seen
    return found


def test_pipelines_obey_the_same_settings(reduced):
    sent = reduced[0]["pipelines"]
    for name, case in PIPELINES.items():
        message = case.get("communication_data_type") or default_message(case, name.split(", ")[1])
        assert {dtype for dtype, _ in sent[name]} == {message}, name
    for stage in range(2):
        usual, halved = (sent[f"ZeRO {stage}, fp32, {kind}"] for kind in (None, "prescale"))
        if stage == 0:
            assert [value for _, value in halved] == [value / 2 for _, value in usual]
        # With reduce-scatter, stage 1 divides first without being asked.
        else:
            assert [value for _, value in halved] == [value for _, value in usual]
