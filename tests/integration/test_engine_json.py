"""What the launcher hands to DeepSpeed, held against DeepSpeed's own configuration classes."""

from pathlib import Path

import pytest
from deepspeed.runtime import constants
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from neox_config import engine_json, load_config, resolve
from neox_config.schema.config import all_parameters

DATA = Path(__file__).parents[2] / "packages/neox-launcher/tests/data"
MINIMAL = """\
num-layers: 4
hidden-size: 16
num-attention-heads: 2
max-position-embeddings: 32
train-iters: 2
train-micro-batch-size-per-gpu: 2
optimizer: {type: Adam, params: {lr: 0.001}}
"""
# DeepSpeed ignores keys of the outermost block that it does not know, so they are compared by name.
# Those in the first line it reads in other modules than runtime/config.py's constants name.
READ_ELSEWHERE = {"timers", "zero_optimization", "flops_profiler", "aio", "fp16", "bf16", "data_types"}
READ_HERE = {value for value in vars(constants).values() if isinstance(value, str)}

STAGES = ["pipe-parallel-size: 1", *(f"zero-stage: {stage}" for stage in range(4))]
PRECISIONS = ["", "precision: fp16", "precision: bfloat16"]
BESIDES = {
    "": {},
    "prescale_gradients: true\nzero_optimization: {reduce_scatter: false}": {"prescale_gradients": True},
    "gradient_predivide_factor: 2.0\nzero_optimization: {reduce_scatter: false}": {
        "gradient_predivide_factor": 2.0
    },
    "dump_state: true": {"dump_state": False},
    "wall_clock_breakdown: true": {"wall_clock_breakdown": False},
    "steps_per_print: 7": {"steps_per_print": 2**62},
    "gradient-clipping: 0.5": {"gradient_clipping": 0.5},
    "fp32-allreduce: true": {},
    "data_types: {grad_accum_dtype: fp32}": {"grad_accum_dtype": "fp32"},
    "aio: {queue_depth: 4}": {},
    "zero_optimization: {overlap_comm: true, reduce_bucket_size: 5e7, contiguous_gradients: false}": {},
    "zero_optimization: {round_robin_gradients: true, sub_group_size: 1e9, elastic_checkpoint: true}": {},
}


# What DeepSpeed reads at stage 0, where neox-model does it.
OURS = {"gradient_clipping": 0.0, "grad_accum_dtype": None}


def resolved_of(tmp_path, *texts):
    paths = []
    for place, text in enumerate((MINIMAL, *texts)):
        path = tmp_path / f"{place}.yml"
        path.write_text(text)
        paths.append(path)
    return resolve(load_config(paths), devices=1)


def settings_of(tmp_path, *texts):
    return engine_json(resolved_of(tmp_path, *texts))


def accepted_by_deepspeed(settings):
    """DeepSpeed's reading of it; every key of every block is one that it knows."""
    assert set(settings) <= READ_HERE | READ_ELSEWHERE
    return DeepSpeedConfig(settings)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_reads_every_combination_as_intended(tmp_path, stage, precision):
    for beside, expected in BESIDES.items():
        if "predivide" in beside and stage == "zero-stage: 3":
            continue  # A rule refuses it.
        settings = settings_of(tmp_path, stage, precision, beside)
        read = accepted_by_deepspeed(settings)
        assert read.zero_optimization_stage == settings["zero_optimization"]["stage"]
        is_sharded = settings["zero_optimization"]["stage"] > 0
        assert read.float16_config.enabled is (is_sharded and precision == "precision: fp16")
        assert read.bfloat16_config.enabled is (is_sharded and precision == "precision: bfloat16")
        found = {name: getattr(read, name) for name in expected}
        assert found == (
            expected
            if is_sharded
            else expected | {name: OURS[name] for name in OURS.keys() & expected.keys()}
        )


def test_documented_names_that_deepspeed_would_not_notice_are_translated(tmp_path):
    read = accepted_by_deepspeed(
        settings_of(tmp_path, "zero-stage: 1\naio: {thread_count: 3}\nfp32-allreduce: true")
    )
    assert read.aio_config["intra_op_parallelism"] == 3
    assert str(read.communication_data_type) == "torch.float32"


def test_nothing_that_waits_or_that_deepspeed_rejects_reaches_it(tmp_path):
    """With every block of DeepSpeed's switched on."""
    blocks = (DATA / "every_block.yml").read_text().replace("num_heads: 4", "num_heads: 2")
    read = accepted_by_deepspeed(settings_of(tmp_path, blocks))
    assert not read.flops_profiler_config.enabled
    assert not read.monitor_config.enabled


def test_the_example_of_the_guide_is_accepted():
    config = load_config([DATA / "guide_example.yml"])
    read = accepted_by_deepspeed(engine_json(resolve(config, devices=1)))
    assert read.train_batch_size == 4
    assert config.engine.wall_clock_breakdown
    assert not read.wall_clock_breakdown


# Documented defaults that are others than DeepSpeed's own, which therefore must be written.
OTHER_DEFAULTS = {
    "gradient_clipping": (0.0, 1.0),
    "zero_optimization.offload_param.pin_memory": (False, True),
    "zero_optimization.offload_optimizer.pin_memory": (False, True),
    # null selects a value by the stage, which DeepSpeed has filled in.
    "zero_optimization.overlap_comm": (None, False),
}
# Blocks and parameters that are handed on -> the attribute of DeepSpeed's configuration that holds them.
HOMES = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "aio": "aio_config",
    **{
        name: name
        for name in (
            *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor"),
            "communication_data_type",
        )
    },
}
NOT_READ = {"zero_optimization.grad_hooks": "removed from DeepSpeed"}
RENAMED = {"aio.thread_count": "intra_op_parallelism"}


def value_in(read, name):
    """Return the value that DeepSpeed holds under the name of a documented parameter."""
    first, *rest = name.split(".")
    found = getattr(read, HOMES[first])
    for part in rest:
        part = RENAMED.get(name, part)
        if isinstance(found, dict):
            found = found[part]
        else:
            aliases = {field.alias: own for own, field in getattr(type(found), "model_fields", {}).items()}
            found = getattr(found, aliases.get(part, part))
    return found


def handed_on():
    """Return the documented defaults of the parameters that DeepSpeed reads."""
    return {
        parameter.name: parameter.default
        for parameter in all_parameters()
        if not parameter.is_block
        and parameter.name.partition(".")[0] in HOMES
        and parameter.name not in NOT_READ
        and not parameter.name.endswith((".device", ".stage", "fp16.enabled", "nvme_path"))
    }


OFFLOADED = "zero_optimization: {stage: 3, offload_param: {device: cpu}, offload_optimizer: {device: cpu}}"


def test_deepspeed_holds_every_documented_default(tmp_path):
    read = accepted_by_deepspeed(settings_of(tmp_path, OFFLOADED, "precision: fp16"))
    found = {name: value_in(read, name) for name in handed_on()}
    by_stage = {"zero_optimization.overlap_comm": True}
    assert found == handed_on() | by_stage


def test_defaults_of_deepspeed_that_differ_from_the_documented_ones_are_known():
    offload = {"device": "cpu"}
    zero = {"offload_param": offload, "offload_optimizer": offload}
    read = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero, "fp16": {}})
    found = {name: (default, value_in(read, name)) for name, default in handed_on().items()}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == OTHER_DEFAULTS


def test_no_key_of_deepspeeds_zero_model_is_documented_and_left_out(tmp_path):
    settings = settings_of(tmp_path, OFFLOADED)["zero_optimization"]
    documented = {
        name.removeprefix("zero_optimization.")
        for name in handed_on()
        if name.startswith("zero_optimization.") and "offload_" not in name
    }
    fields = {
        name for own, field in DeepSpeedZeroConfig.model_fields.items() for name in (own, field.alias) if name
    }
    assert documented <= fields
    # Where it is null, DeepSpeed selects a value by the stage.
    assert documented - settings.keys() == {"overlap_comm", "elastic_checkpoint"}
