import logging
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

from neox_model.engine import build
from support.distributed import run_ranks
from support.settings import resolved_from
from support.tiers import slow_except


class Toy(torch.nn.Module):
    """Takes tokens and targets to a loss, `factor` times as large as it should be."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
        self.factor = factor

    def forward(self, tokens: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits = self.layers(tokens).float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets[0].flatten()) * self.factor


ENGINES = {
    f"{engine}, ZeRO {stage}": {"engine": engine, "zero_optimization": {"stage": stage}}
    for engine in ("torch", "deepspeed")
    for stage in range(3)
}


def start_and_train() -> dict:
    """Return what one update of each kind of engine reports; runs in a rank."""
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    from neox_config.errors import NeoXError
    from neox_config.facts.learning_rate import WarmupThenDecay
    from neox_model.engine.build import build_engine, prepare_engine
    from neox_model.optim.lr_schedule import LearningRateSchedule
    from neox_model.parallel.topology import create_groups
    from neox_model.train.data.batch import as_batch
    from neox_model.train.step import EngineStep
    from support.settings import resolved_from

    groups = create_groups(1, 1)
    prepare_engine(resolved_from({"engine": "deepspeed"}).run)
    try:
        ALL_OPS["cpu_adam"].load()
        refused = ""
    except NeoXError as error:
        refused = str(error)

    compiled = [name for name in sys.modules if name.startswith("torch._inductor.compile_fx")]

    def train(kind: dict, factor: float) -> dict:
        torch.manual_seed(0)
        model = Toy(factor)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        curve = WarmupThenDecay(style="constant", peak=0.1, floor=0.0, warmup=0.0, decay_iterations=9)
        schedule = LearningRateSchedule(optimizer, curve)
        settings = {"gradient_accumulation_steps": 1, "gradient_clipping": 1e-3} | kind
        resolved = resolved_from(settings)
        engine = build_engine(resolved.run, resolved.update, model, optimizer, schedule, groups=groups)

        step = EngineStep(engine, accumulation=1)
        report = step(iter([as_batch(torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7]]))]))
        return {
            "update": type(engine.update).__name__,
            "norm": float(report.grad_norm),
            "loss_scale": None if report.loss_scale is None else float(report.loss_scale),
            "skipped": bool(report.skipped),
            "updates": schedule.applied_updates,
        }

    return {
        "compilable": deepspeed.ops.__compatible_ops__,
        "refused": refused,
        "muon": "deepspeed.runtime.zero.muon.original_muon" in sys.modules,
        "compiled": compiled,
        "engines": {
            f"{name}, {precision}": train(settings | {"precision": precision}, 1.0)
            for name, settings in ENGINES.items()
            for precision in ("fp32", "bfloat16", "fp16")
        },
        "overflows": {
            f"{name}, {precision}": train(settings | {"precision": precision}, float("inf"))
            for name, settings in ENGINES.items()
            for precision in ("fp32", "bfloat16", "fp16")
        },
    }


@pytest.fixture(scope="module")
def started() -> dict:
    return run_ranks(start_and_train, size=1)[0]


def test_no_operator_is_compiled(started):
    assert started["compilable"] == {}
    assert "cpu_adam is not" in started["refused"]
    assert "DS_BUILD_CPU_ADAM=1" in started["refused"]


def test_muon_is_imported_beforehand_without_the_compiler(started):
    assert started["muon"]
    assert started["compiled"] == []


def test_every_engine_reports_the_norm_before_clipping(started):
    norms = {name: found["norm"] for name, found in started["engines"].items()}
    assert norms["torch, ZeRO 0, fp32"] > 0.1
    for name, norm in norms.items():
        assert norm == pytest.approx(norms["torch, ZeRO 0, fp32"], rel=1e-5 if "fp32" in name else 0.02), name


def test_only_deepspeeds_zero_makes_updates_that_are_not_ours(started):
    classes = {name: found["update"] for name, found in started["engines"].items()}
    ours = {name for name, found in classes.items() if found == "Updater"}
    zero = {name for name in classes if name.startswith(("deepspeed, ZeRO 1", "deepspeed, ZeRO 2"))}
    assert len(zero) == 6
    assert ours == classes.keys() - zero
    assert {classes[name] for name in zero} == {"ZeroUpdate"}


def test_only_float16_reports_the_scale_of_its_loss(started):
    scales = {name: found["loss_scale"] for name, found in started["engines"].items()}
    assert scales == {name: 65536.0 if "fp16" in name else None for name in scales}


def test_a_loss_that_is_not_finite_is_a_skipped_update_on_every_engine(started):
    for name, found in started["engines"].items():
        assert (found["skipped"], found["updates"]) == (False, 1), name
    for name, found in started["overflows"].items():
        assert (found["skipped"], found["updates"]) == (True, 0), name


def stop_when_one_rank_is_told() -> list:
    """Train until rank 1 alone has had a signal; runs in every rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.callbacks.stop import StopCallback
    from neox_model.train.run import Run
    from neox_model.train.state import TrainState
    from support.runs import AfterStep, a_run, train

    groups = create_groups(1, 1)

    def signal_rank_1(run: Run) -> None:
        if run.state.iteration == 3 and groups.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    stop = StopCallback(groups.control, exit_interval=None)
    state = TrainState(last_iteration=1000, samples_per_iteration=8)
    run = a_run(AfterStep(signal_rank_1), stop, state=state, groups=groups)
    train(run, range(1000))
    return [state.iteration, state.stop_reason]


def test_a_signal_to_one_rank_ends_all_after_the_same_iteration():
    assert run_ranks(stop_when_one_rank_is_told, size=2) == [[4, "SIGTERM received"]] * 2


def evaluated_loss(settings: dict, devices: int) -> float:
    """Of two micro-batches under the initial weights; runs in every rank."""
    from neox_model.assembly.model import build_model
    from neox_model.engine.build import build_forward, prepare_engine
    from neox_model.parallel.topology import create_groups
    from neox_model.train.data.batch import as_batch
    from neox_model.train.step import as_micro_batches
    from support.settings import resolved_from

    resolved = resolved_from(settings, devices=devices)
    prepare_engine(resolved.run)
    groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    engine = build_forward(
        resolved.run, build_model(resolved.model, resolved.run, groups, vocab_size=11), groups=groups
    )
    batch = as_batch(torch.arange(26).view(2, 13) % 11)
    return float(engine.evaluate(as_micro_batches(iter([batch, batch])), 2))


def test_a_pipeline_that_evaluates_sends_each_rank_s_part_of_the_sequence():
    split = {"pipe_parallel_size": 2, "model_parallel_size": 2, "sequence_parallel": True}
    losses = run_ranks(evaluated_loss, size=4, settings=split, devices=4)
    (alone,) = run_ranks(evaluated_loss, size=1, settings={"pipe_parallel_size": 1}, devices=1)
    assert losses == pytest.approx([alone] * 4, abs=1e-5)


def count_read_backs(settings: dict) -> dict[str, int]:
    """How often one iteration reads a number back from its device; runs in every rank."""
    from neox_config.derive.learning_rate import learning_rate_curve
    from neox_model.assembly.model import build_model
    from neox_model.assembly.optimizer import build_optimizer
    from neox_model.engine.build import build_engine, prepare_engine
    from neox_model.optim.lr_schedule import LearningRateSchedule
    from neox_model.parallel.topology import create_groups
    from neox_model.train.data.batch import as_batch
    from neox_model.train.state import TrainState
    from neox_model.train.step import EngineStep
    from support.read_backs import ReadBacks
    from support.settings import resolved_from

    world = torch.distributed.get_world_size()
    resolved = resolved_from(settings | {"gradient_clipping": 1.0}, devices=world)
    groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    prepare_engine(resolved.run)
    model = build_model(resolved.model, resolved.run, groups, vocab_size=11)
    optimizer = build_optimizer(
        resolved.update.optimizer, resolved.run, model, model_group=groups.model, data_group=groups.data
    )
    schedule = LearningRateSchedule(optimizer, learning_rate_curve(resolved.config, decay_iterations=9))
    engine = build_engine(resolved.run, resolved.update, model, optimizer, schedule, groups=groups)
    step = EngineStep(engine, accumulation=2)
    state = TrainState(last_iteration=9, samples_per_iteration=4)
    counts = []
    for _ in range(3):
        batches = iter([as_batch(torch.arange(26).view(2, 13) % 11)] * 2)
        with ReadBacks() as reads:
            state.advance(step(batches))
        counts.append(reads.count)
    assert state.iteration == 3
    return {"last": counts[-1]}


READ_BACKS: dict[str, tuple[int, dict, int]] = {
    **{
        f"torch, ZeRO {stage}": (2, {"engine": "torch", "zero_optimization": {"stage": stage}}, 0)
        for stage in range(4)
    },
    "torch, pipeline": (2, {"engine": "torch", "pipe_parallel_size": 2}, 0),
    "torch, zero-bubble pipeline": (2, {"pipe_parallel_size": 2, "pipeline_schedule": "zero_bubble"}, 0),
    "DeepSpeed, ZeRO 0": (2, {"engine": "deepspeed"}, 0),
    "DeepSpeed, pipeline": (1, {"pipe_parallel_size": 1}, 0),
    "torch, pipeline, ZeRO 1": (
        2,
        {"pipe_parallel_size": 1, "engine": "torch", "zero_optimization": {"stage": 1}},
        0,
    ),
}
"""Ranks, settings, and numbers that an iteration reads back from its device."""


@pytest.mark.parametrize("precision", slow_except(["fp32", "bfloat16", "fp16"], "bfloat16"))
@pytest.mark.parametrize("name", READ_BACKS)
def test_an_iteration_reads_back_from_its_device_only_what_is_listed(precision, name):
    ranks, settings, count = READ_BACKS[name]
    found = run_ranks(count_read_backs, size=ranks, settings=settings | {"precision": precision})
    assert found == [{"last": count}] * ranks


def test_an_optimizer_that_cannot_skip_reads_back_once():
    settings = {"precision": "fp16", "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    assert run_ranks(count_read_backs, size=1, settings=settings) == [{"last": 1}]


@pytest.mark.parametrize(
    ("engine", "devices", "is_logged"), [("torch", 1, False), ("torch", 2, True), ("deepspeed", 1, True)]
)
def test_the_engine_is_logged_unless_it_is_torch_in_one_process(
    engine, devices, is_logged, caplog, monkeypatch
):
    caplog.set_level(logging.INFO, "neox_model")
    monkeypatch.setattr(build, "engine_module", lambda run: SimpleNamespace(prepare=lambda: None))
    build.prepare_engine(resolved_from({"engine": engine}, devices=devices).run)
    assert [f"the engine is {engine}" in message for message in caplog.messages] == [True] * is_logged
