"""What the launcher hands to DeepSpeed, held against DeepSpeed's own configuration classes."""

import os
from pathlib import Path

import pytest
from deepspeed.runtime import constants
from deepspeed.runtime.config import DeepSpeedConfig

from neox_launcher.config import engine_json, load_config, resolve
from support.distributed import run_ranks

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
    "dump_state: true": {"dump_state": True},
    "wall_clock_breakdown: true": {"wall_clock_breakdown": True},
    "steps_per_print: 7": {"steps_per_print": 7},
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
def test_deepspeed_reads_every_combination_as_it_is_meant(tmp_path, stage, precision):
    for beside, expected in BESIDES.items():
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
    read = accepted_by_deepspeed(settings_of(tmp_path, (DATA / "every_block.yml").read_text()))
    assert read.flops_profiler_config.enabled
    assert not read.monitor_config.enabled


def test_the_example_of_the_guide_is_accepted():
    config = load_config([DATA / "guide_example.yml"])
    read = accepted_by_deepspeed(engine_json(resolve(config, devices=1)))
    assert read.train_batch_size == 4
    assert read.wall_clock_breakdown


def profile(report: str) -> None:
    """Two updates of a tiny model with our engine; runs in a rank."""
    os.environ.setdefault("LOCAL_RANK", "0")
    import torch

    from neox_model.optim.lr_schedule import LearningRateSchedule, WarmupThenDecay
    from neox_model.parallel.topology import create_groups
    from neox_model.train.batch import as_batch
    from neox_model.train.engine import build_engine, prepare_deepspeed
    from neox_model.train.sequential_step import SequentialStep
    from support.settings import resolved_from

    groups = create_groups(1, 1)
    prepare_deepspeed()

    class Toy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))

        def forward(self, tokens: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            logits = self.layers(tokens).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, targets[0].flatten())

    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    curve = WarmupThenDecay(style="constant", peak=0.1, floor=0.0, warmup=0.0, decay_iterations=9)
    schedule = LearningRateSchedule(optimizer, curve)
    profiler = {"enabled": True, "profile_step": 1, "output_file": report}
    resolved = resolved_from({"gradient_accumulation_steps": 1, "flops_profiler": profiler})
    engine = build_engine(resolved, model, optimizer, schedule, groups=groups)

    step = SequentialStep(engine, accumulation=1, tokens=6, data=groups.data)
    for _ in range(2):
        step(iter([as_batch(torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7]]))]))


def test_the_profile_of_an_iteration_is_written_by_our_engine(tmp_path):
    report = tmp_path / "profile.txt"
    run_ranks(profile, size=1, report=str(report))
    assert "Profile Summary at step" in report.read_text()
