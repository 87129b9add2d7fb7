"""Schedules of pipelines: what they require, hold in memory and leave idle; rules and messages about them."""

from typing import Any

import pytest

from neox_config import load_config, resolve
from neox_config.derive.engine import chosen_engine
from neox_config.derive.pipeline import chunks_per_stage
from neox_config.errors import ConfigError
from neox_config.facts.pipeline_schedules import (
    SCHEDULES,
    idle_share,
    most_passes_in_flight,
    stage_of_part,
    why_not_micro_batches,
)
from support.refusals import shows

MODEL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "train_iters": 10,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "pipe_parallel_size": 4,
}


@pytest.fixture
def resolved(tmp_path):
    def of(**settings: Any):
        path = tmp_path / "small.yml"
        values = MODEL | settings
        path.write_text("\n".join(f"{name}: {_text(value)}" for name, value in values.items()))
        return resolve(load_config([path]), devices=4)

    return of


def _text(value: Any) -> Any:
    return str(value).replace("'", '"').replace("True", "true").replace("False", "false")


def test_parts_go_round_the_stages_or_forth_and_back():
    assert [stage_of_part(part, stages=3, placement="loop") for part in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [stage_of_part(part, stages=3, placement="v") for part in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("schedule", "chunks", "micro_batches", "expected"),
    [
        ("1f1b", 1, 9, 3 / 12),
        ("interleaved", 2, 8, 1.5 / 9.5),
        ("interleaved", 3, 8, 1 / 9),
        ("zero_bubble", 1, 8, 3 / 27),
        ("zero_bubble", 2, 8, 1.5 / 25.5),
        ("zbv", 2, 8, 1.5 / 25.5),
    ],
)
def test_the_idle_share_of_equal_passes(schedule, chunks, micro_batches, expected):
    found = idle_share(schedule, stages=4, chunks=chunks, micro_batches=micro_batches)
    assert found == pytest.approx(expected)
    assert idle_share(schedule, stages=1, chunks=chunks, micro_batches=micro_batches) == 0


def test_an_earlier_stage_holds_more_micro_batches():
    def held(schedule: Any, chunks: int, **more: int) -> list[int]:
        sizes = {"stages": 4, "chunks": chunks, "micro_batches": 8} | more
        return [most_passes_in_flight(schedule, stage=stage, **sizes) for stage in range(4)]

    assert held("1f1b", 1) == [4, 3, 2, 1]
    assert held("1f1b", 1, micro_batches=2) == [2, 2, 2, 1]
    # (chunks - 1) rounds of four, two for each later stage, and the one that runs.
    assert held("interleaved", 2) == [11, 9, 7, 5]
    assert held("zero_bubble", 2) == [8, 7, 6, 5]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multiples_of_the_stages_suit_every_schedule(schedule):
    for micro_batches in (4, 8, 32):
        assert why_not_micro_batches(schedule, stages=4, micro_batches=micro_batches) is None


def test_rounds_of_unequal_size_are_refused_with_the_numbers(resolved):
    assert why_not_micro_batches("interleaved", stages=4, micro_batches=10) is None
    with pytest.raises(ConfigError) as caught:
        resolved(pipeline_schedule="interleaved", gradient_accumulation_steps=9)
    assert shows(str(caught.value), "9 micro-batches", "2 rounds")
    assert "12 micro-batches per" in str(caught.value)
    assert resolved(pipeline_schedule="zbv", gradient_accumulation_steps=9).run.batch.accumulation == 9
    # DeepSpeed's 1F1B, and torch's, run any number.
    for engine in ("deepspeed", "torch"):
        resolved(engine=engine, gradient_accumulation_steps=3)


def test_a_schedule_decides_the_chunks(resolved):
    found = {name: resolved(pipeline_schedule=name).config for name in SCHEDULES}
    assert {name: chunks_per_stage(config) for name, config in found.items()} == {
        "1f1b": 1,
        "interleaved": 2,
        "zero_bubble": 1,
        "zbv": 2,
    }


def test_pipelines_run_on_the_torch_engine_unless_a_setting_requires_deepspeed(resolved):
    for name in SCHEDULES:
        assert chosen_engine(resolved(pipeline_schedule=name).config).name == "torch"
    offloads = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    chosen = chosen_engine(resolved(zero_optimization=offloads).config)
    assert chosen.name == "deepspeed"
    assert chosen.reason.startswith("zero-optimization.offload-optimizer.device is carried out by DeepSpeed")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 1}, "must be at least 2"),
        ({"pipeline_schedule": "zbv", "virtual_pipeline_stages": 3}, "must be at most 2"),
        ({"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 3}, "4 x 3 chunks"),
        ({"pipeline_schedule": "zbv", "engine": "deepspeed"}, "runs on the torch engine alone"),
        ({"pipeline_schedule": "zero_bubble", "checkpoint_activations": True}, "again for every weight"),
        (
            {
                "pipeline_schedule": "interleaved",
                "checkpoint_activations": True,
                "partition_activations": True,
                "contiguous_checkpointing": True,
            },
            "set number-checkpoints",
        ),
        (
            {"pipeline_schedule": "zero_bubble", "zero_optimization": {"stage": 3}},
            "must be at most 2 with pipeline-schedule zero_bubble",
        ),
        (
            {"pipeline_schedule": "zbv", "zero_optimization": {"stage": 3}},
            "after stage 3 has freed the layer",
        ),
        (
            {"engine": "deepspeed", "zero_optimization": {"stage": 2}},
            "must be at most 1 with a pipeline on the deepspeed engine",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "must be at most 1 with a pipeline on the deepspeed engine",
        ),
    ],
)
def test_what_a_schedule_cannot_go_with_is_refused_with_the_reason(resolved, settings, message):
    with pytest.raises(ConfigError) as caught:
        resolved(**settings)
    assert message in str(caught.value)
