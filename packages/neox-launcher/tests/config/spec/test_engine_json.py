"""Configuration passed to DeepSpeed."""

import json
from pathlib import Path

import pytest

from neox_config import engine_json, resolve


def settings_of(load, text="", devices=2):
    return engine_json(resolve(load(text), devices=devices))


CASES = {
    "plain": ("", {"zero_optimization": {"stage": 0}, "gradient_clipping": 0.0, "train_batch_size": 4}),
    "zero": (
        "zero_optimization: {stage: 2, overlap_comm: true, reduce_bucket_size: 5e7, grad_hooks: true}",
        {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 50_000_000}},
    ),
    "offload": (
        "zero_optimization: {stage: 3, offload_param: {device: cpu}, offload_optimizer: {device: none}}",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {
                    "device": "cpu",
                    "nvme_path": None,
                    "pin_memory": False,
                    "buffer_count": 5,
                    "buffer_size": 100_000_000,
                    "max_in_cpu": 1_000_000_000,
                },
            }
        },
    ),
    "fp16": (
        "zero-stage: 1\nfp16: {enabled: true, initial_scale_power: 8}",
        {
            "fp16": {
                "enabled": True,
                "auto_cast": False,
                "loss_scale": 0.0,
                "initial_scale_power": 8,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "consecutive_hysteresis": False,
                "min_loss_scale": 1,
            }
        },
    ),
    "bf16 accumulates in fp32 under ZeRO": (
        "precision: bfloat16\nzero-stage: 1",
        {
            "bf16": {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    ),
    "bf16 accumulates as it is told": (
        "precision: bfloat16\nzero-stage: 1\ndata_types: {grad_accum_dtype: bf16}",
        {"data_types": {"grad_accum_dtype": "bf16"}},
    ),
    "aio": (
        "aio: {queue_depth: 16, thread_count: 2}",
        {
            "aio": {
                "block_size": 1048576,
                "queue_depth": 16,
                "intra_op_parallelism": 2,
                "single_submit": False,
                "overlap_events": True,
            }
        },
    ),
    "communication": (
        "zero-stage: 1\nfp32-allreduce: true\ndata_types: {grad_accum_dtype: fp32}",
        {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_requested_settings_are_in_the_engine_json(load, case):
    text, expected = CASES[case]
    settings = settings_of(load, text)
    found = {name: settings[name] for name in expected}
    if "zero_optimization" in expected:
        zero = expected["zero_optimization"]
        found["zero_optimization"] = {name: found["zero_optimization"][name] for name in zero}
    assert found == expected
    assert json.loads(json.dumps(settings)) == settings


@pytest.mark.parametrize("precision", ["precision: fp32", "precision: bfloat16", "precision: fp16"])
def test_at_stage_0_deepspeed_neither_scales_nor_clips_nor_reduces(load, precision):
    settings = settings_of(load, f"{precision}\ngradient-clipping: 0.5\nfp32-allreduce: true")
    assert settings["gradient_clipping"] == 0.0
    assert settings.keys().isdisjoint({"fp16", "bf16", "data_types", "communication_data_type"})
    assert settings_of(load, "zero-stage: 1\ngradient-clipping: 0.5")["gradient_clipping"] == 0.5


def test_nothing_in_it_makes_deepspeed_compile_or_talk(load):
    settings = settings_of(load, "zero-stage: 1")
    assert "optimizer" not in settings
    assert "scheduler" not in settings
    assert settings["zero_force_ds_cpu_optimizer"] is False
    assert settings["zero_allow_untested_optimizer"] is True
    assert settings["steps_per_print"] > 10**9


def test_deepspeed_does_not_print_the_times_that_the_training_measures(load):
    assert settings_of(load, "wall_clock_breakdown: true")["wall_clock_breakdown"] is False


@pytest.mark.parametrize("layout", ["", "pipe-parallel-size: 2"])
def test_deepspeed_does_not_profile_what_the_training_profiles(load, layout):
    settings = settings_of(load, f"flops_profiler: {{enabled: true}}\n{layout}")
    assert settings["flops_profiler"] == {"enabled": False}


def test_deepspeed_prints_no_report_and_its_timer_never_waits_for_the_device(load):
    settings = settings_of(load, "steps_per_print: 5")
    assert settings["timers"] == {"throughput": {"enabled": False}}
    assert settings["steps_per_print"] > 10**9


# tests/integration/test_engine_json.py holds them against DeepSpeed.
READ_BY_DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "timers",
    "wall_clock_breakdown",
    "dump_state",
    "prescale_gradients",
    "gradient_predivide_factor",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "fp16",
    "bf16",
    "communication_data_type",
    "data_types",
    "flops_profiler",
    "aio",
}


@pytest.mark.parametrize("case", CASES)
def test_no_other_key_is_in_it(load, case):
    assert set(settings_of(load, CASES[case][0])) <= READ_BY_DEEPSPEED


def test_nothing_that_waits_or_that_deepspeed_rejects_reaches_it(load):
    """With every block of DeepSpeed's switched on."""
    text = (Path(__file__).parents[2] / "data/every_block.yml").read_text()
    assert set(settings_of(load, text)) <= READ_BY_DEEPSPEED
